"""Environments by name; a wrong name is a one-sentence error."""

from __future__ import annotations

import sys
from importlib.metadata import EntryPoint

import gymnasium
import pytest

from agentrl import UserError, env_ids, make, register
from agentrl.envs import find, registry, tasks_of
from agentrl.errors import UnknownEnvError
from tests.worlds import Parrot, Talk


class Sized(Parrot):
    """Takes an argument."""

    def __init__(self, size: int = 1) -> None:
        super().__init__()
        self.size = size


@pytest.fixture(autouse=True)
def _own_registry(monkeypatch):
    monkeypatch.setattr(registry, "_registered", {})
    monkeypatch.setattr(registry, "entry_points", lambda group: ())
    before = dict(gymnasium.registry)
    yield
    gymnasium.registry.clear()
    gymnasium.registry.update(before)


def offer(monkeypatch, **points):
    offered = [EntryPoint(name, value, "agentrl.envs") for name, value in points.items()]
    monkeypatch.setattr(registry, "entry_points", lambda group: offered if group == "agentrl.envs" else ())


def test_a_registered_environment_is_made_with_its_id_and_its_arguments():
    register("Sized-v0", Sized, size=2)
    env = make("Sized-v0")
    assert (env.id, env.size) == ("Sized-v0", 2)
    assert make("Sized-v0", size=3).size == 3
    assert make("Sized-v0") is not env


def test_the_id_of_one_instance_does_not_leak_into_the_class():
    register("Other-v0", Parrot)
    assert make("Other-v0").id == "Other-v0"
    assert Parrot.id == "Parrot-v0"


@pytest.mark.parametrize("id", ["Sized", "Sized-v", "Sized-0", "", "Sized v0", "Sized-v0 ", "a/b/c-v0"])
def test_an_id_without_a_version_is_refused(id):
    with pytest.raises(UserError, match=r"looks like `Name-v0`, got .*add a version"):
        register(id, Sized)


@pytest.mark.parametrize("id", ["Sized-v0", "lab/Sized-v12", "two.words_and-more-v3"])
def test_an_id_may_carry_a_namespace_and_any_version(id):
    assert register(id, Sized).id == id


@pytest.mark.parametrize("target", [Sized(), dict, "Sized"])
def test_only_subclasses_of_env_are_registered(target):
    with pytest.raises(UserError, match=r"Sized-v0: register a subclass of agentrl\.Env"):
        register("Sized-v0", target)


def test_registering_again_replaces():
    register("Sized-v0", Sized, size=2)
    register("Sized-v0", Sized, size=5)
    assert make("Sized-v0").size == 5


def test_an_unknown_id_is_refused_with_a_suggestion_and_what_is_installed():
    register("HopSearch-v0", Sized)
    register("Talk-v0", Talk)
    with pytest.raises(UnknownEnvError) as caught:
        make("HopSerch-v0")
    assert str(caught.value) == (
        "no environment `HopSerch-v0`. Did you mean `HopSearch-v0`? Installed: HopSearch-v0, Talk-v0."
    )


def test_with_nothing_installed_the_error_lists_none():
    with pytest.raises(UnknownEnvError, match=r"Installed: none\."):
        make("X-v0")


def test_an_argument_that_the_class_does_not_take_is_named():
    register("Sized-v0", Sized)
    with pytest.raises(UserError, match=r"Sized-v0: there is no argument `colour`\. It takes size\."):
        make("Sized-v0", colour="red")


def test_a_class_that_lacks_a_method_is_named_with_the_method():
    class Half(Parrot):
        tasks = Talk.__mro__[1].tasks

    register("Half-v0", Half)
    with pytest.raises(UserError, match="Half-v0: Half lacks `tasks`; write that method"):
        make("Half-v0")


def test_a_path_names_an_unregistered_class():
    env = make("tests.worlds:Parrot")
    assert type(env).__name__ == "Parrot"
    assert env.id == "tests.worlds:Parrot"
    assert env_ids() == []


@pytest.mark.parametrize(
    ("path", "sentence"),
    [
        ("tests.worlds:Nothing", "name it `package.module:Class`"),
        ("tests.nowhere:Parrot", "No module named 'tests.nowhere'"),
        (":Parrot", "name it `package.module:Class`"),
        ("..worlds:Parrot", "name it `package.module:Class`"),
        ("tests.worlds:echo", "not a subclass of agentrl.Env"),
        ("tests.worlds:", "name"),
    ],
)
def test_a_path_that_leads_nowhere_is_a_one_sentence_error(path, sentence):
    with pytest.raises(UnknownEnvError) as caught:
        make(path)
    assert path in str(caught.value)
    assert sentence in str(caught.value)


@pytest.mark.parametrize(
    ("code", "sentence"),
    [
        ("from agentrl import Taks", "line 1 (ImportError: cannot import name 'Taks' from 'agentrl'"),
        ("import no_such_module", "line 1 (ModuleNotFoundError: No module named 'no_such_module'); mend"),
        ("\n\nx = unknown", "line 3 (NameError: name 'unknown' is not defined); mend that module."),
        ("from agentrl import Limits\nx = Limits(max_turn=3)", "line 2 (TypeError: Limits.__init__() got an"),
        (
            "from agentrl import Limits\nx = Limits(max_turns=0)",
            "line 2 (ValueError: max_turns must be above 0",
        ),
    ],
)
def test_a_module_that_fails_is_named_with_its_line(tmp_path, monkeypatch, code, sentence):
    (tmp_path / "failing_world.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UnknownEnvError) as caught:
        make("failing_world:World")
    assert "importing failing_world failed in failing_world.py, " in str(caught.value)
    assert sentence in str(caught.value)


def test_a_name_that_a_module_lacks_is_suggested():
    with pytest.raises(UnknownEnvError, match=r"has no attribute 'Parot'; .* Did you mean `Parrot`\?"):
        make("tests.worlds:Parot")


def test_a_module_that_python_cannot_read_is_a_one_sentence_error(tmp_path, monkeypatch):
    (tmp_path / "unreadable_world.py").write_text("class World(:\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UnknownEnvError, match="unreadable_world"):
        make("unreadable_world:World")


def test_an_entry_point_offers_an_environment_and_is_imported_at_its_first_use(tmp_path, monkeypatch):
    (tmp_path / "offered_world.py").write_text("from tests.worlds import Parrot as World\n")
    monkeypatch.syspath_prepend(tmp_path)
    offer(monkeypatch, **{"Offered-v0": "offered_world:World", "Broken-v0": "no_such_module:World"})
    assert env_ids() == ["Broken-v0", "Offered-v0"]
    assert "offered_world" not in sys.modules
    assert make("Offered-v0").id == "Offered-v0"
    assert find("Offered-v0").env_class.__name__ == "Parrot"
    with pytest.raises(UnknownEnvError, match=r"`Broken-v0` is offered by no_such_module:World"):
        make("Broken-v0")


def test_what_was_registered_goes_before_what_is_offered(monkeypatch):
    offer(monkeypatch, **{"Sized-v0": "no_such_module:World"})
    register("Sized-v0", Sized)
    assert make("Sized-v0").size == 1
    assert env_ids() == ["Sized-v0"]


def test_an_entry_point_may_lead_to_a_spec_so_that_one_class_offers_several_ids(tmp_path, monkeypatch):
    (tmp_path / "sized_worlds.py").write_text(
        "from agentrl import register\n"
        "from tests.envs.test_registry import Sized\n"
        "small, big = (register(id, Sized, size=n) for id, n in {'Small-v0': 1, 'Big-v0': 50}.items())\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    offer(monkeypatch, **{"Big-v0": "sized_worlds:big", "Small-v0": "sized_worlds:small"})
    assert env_ids() == ["Big-v0", "Small-v0"]
    assert (make("Big-v0").size, make("Small-v0").size) == (50, 1)
    assert make("Big-v0", size=7).size == 7
    assert make("Big-v0").id == "Big-v0"


def test_an_entry_point_that_leads_to_something_else_is_a_one_sentence_error(monkeypatch):
    offer(monkeypatch, **{"Echo-v0": "tests.worlds:echo"})
    with pytest.raises(UserError, match=r"Echo-v0: register a subclass of .*, got <function echo"):
        make("Echo-v0")


def test_everything_installed_is_registered_with_gymnasium_without_importing_it(monkeypatch):
    offer(monkeypatch, **{"Broken-v0": "no_such_module:World", "no version": "no_such_module:World"})
    register("Sized-v0", Sized)
    registry.register_all_with_gymnasium()
    assert {"agentrl/Broken-v0", "agentrl/Sized-v0"} <= set(gymnasium.registry)
    assert "agentrl/no version" not in gymnasium.registry


def offer_families(monkeypatch, folder, **families):
    """Offer families, each a mapping in a module of its own, by the pattern `NAME-*-v0`."""
    monkeypatch.syspath_prepend(folder)
    points = []
    for name, members in families.items():
        (folder / f"{name}_family.py").write_text(f"FAMILY = {members!r}\n")
        points.append(EntryPoint(f"{name}-*-v0", f"{name}_family:FAMILY", "agentrl.env_families"))
    monkeypatch.setattr(
        registry, "entry_points", lambda group: points if group == "agentrl.env_families" else ()
    )


SIZES = {f"Sized-{n}-v0": ("tests.envs.test_registry:Sized", {"size": n}) for n in (1, 2, 30)}


def test_a_family_offers_many_environments_of_one_class(tmp_path, monkeypatch):
    offer_families(monkeypatch, tmp_path, Sized=SIZES)
    assert env_ids() == sorted(SIZES)
    assert [make(id).size for id in SIZES] == [1, 2, 30]
    assert make("Sized-2-v0", size=5).size == 5
    assert registry.families().keys() == {"Sized-*-v0"}
    registry.register_all_with_gymnasium()
    assert "agentrl/Sized-30-v0" in gymnasium.registry


def test_a_pattern_names_every_id_that_it_matches(tmp_path, monkeypatch):
    offer_families(monkeypatch, tmp_path, Sized=SIZES)
    register("Talk-v0", Talk)
    assert registry.matching("Sized-*") == ["Sized-1-v0", "Sized-2-v0", "Sized-30-v0"]
    assert registry.matching("Sized-?-v0") == ["Sized-1-v0", "Sized-2-v0"]
    assert registry.matching("*") == env_ids()
    assert registry.matching("Talk-v0") == ["Talk-v0"]
    assert registry.matching("tests.worlds:Parrot") == ["tests.worlds:Parrot"]
    with pytest.raises(
        UnknownEnvError, match=r"no environment `Seized-\*`.*Installed: Sized-\*-v0, Talk-v0\."
    ):
        registry.matching("Seized-*")
    with pytest.raises(UnknownEnvError, match="Did you mean `Sized-30-v0`"):
        registry.matching("Sizd-30-v0")


def test_a_family_whose_class_or_mapping_is_missing_is_a_one_sentence_error(tmp_path, monkeypatch):
    broken = {"Gone-1-v0": ("no_such_module:World", {})}
    offer_families(monkeypatch, tmp_path, Sized=SIZES, Gone=broken)
    with pytest.raises(UnknownEnvError, match=r"`Gone-1-v0` is offered by no_such_module:World"):
        make("Gone-1-v0")
    lost = EntryPoint("Lost-*-v0", "no_such_module:FAMILY", "agentrl.env_families")
    monkeypatch.setattr(registry, "entry_points", lambda group: (lost,) if "families" in group else ())
    with pytest.warns(UserWarning, match=r"`Lost-\*-v0` is offered by no_such_module:FAMILY"):
        assert env_ids() == []


def test_a_declared_split_gives_its_tasks_and_any_other_is_a_one_sentence_error():
    env = Parrot()
    assert tasks_of(env, "test") == env.tasks("test")
    with pytest.raises(UserError) as caught:
        tasks_of(env, "trian")
    assert str(caught.value) == "Parrot-v0 has no split `trian`. Did you mean `train`? It has train, test."
