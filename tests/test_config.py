"""Configuration: closed, frozen, and a one-line error for every mistake."""

from __future__ import annotations

import math
from typing import Literal, get_args, get_origin

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import Field, ValidationError, model_validator

from agentrl.assembly.config import RunConfig
from agentrl.config import (
    Section,
    by_section,
    effective_values,
    import_path,
    leaves,
    merge,
    parse,
    read_toml,
    write_toml,
)
from agentrl.config.keys import plain, words_of
from agentrl.errors import ConfigError
from agentrl.evaluation.config import EvalConfig
from agentrl.types import JSON


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("package.module:name", "package.module:name"),
        ("package.module.name", "package.module:name"),
        ("module.name", "module:name"),
        ("deep/er/file.py:name", "deep.er.file:name"),
        ("./file.py:Class", "file:Class"),
        ("module:make.<locals>.inner", "module:make.<locals>.inner"),
        ("exact_match", "exact_match"),
        ("3.5", "3.5"),
    ],
)
def test_paths_of_functions_have_three_forms(text, path):
    assert import_path(text) == path


def test_a_file_is_named_from_anywhere_below_the_folder_that_the_command_starts_in(tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert import_path(f"{tmp_path}/here/own/file.py:name") == "own.file:name"
    for outside in (f"{tmp_path}/file.py:name", "../file.py:name", "my-file.py:name"):
        with pytest.raises(ValueError, match="below the folder that the command starts in"):
            import_path(outside)


class Oven(Section):
    """Where it bakes."""

    heat: int = 200
    """Degrees (Celsius)."""
    fan: bool = False
    """Turn the fan."""
    shelf: Literal["top", "bottom"] = "top"
    """Which shelf."""


class Dough(Section):
    """What it bakes."""

    flour: float = Field(default=0.5, gt=0)
    """Flour (kg)."""
    label: str | None = None
    """What it is called."""
    extras: dict[str, JSON] = Field(default_factory=dict)
    """What else goes in."""

    @model_validator(mode="after")
    def _no_empty_label(self):
        if self.label == "":
            raise ValueError("label is empty; leave it out or write something.")
        return self


class Bakery(Section):
    """Both."""

    oven: Oven = Oven()
    dough: Dough = Dough()


def refusal(values):
    with pytest.raises(ConfigError) as caught:
        parse(Bakery, values, source="run.toml")
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith("run.toml: ")
    return message


def test_values_are_read_into_their_sections():
    config = parse(Bakery, {"oven": {"heat": 180}}, source="run.toml")
    assert config.oven == Oven(heat=180)
    assert config.dough == Dough()


def test_an_unknown_key_is_an_error_with_its_path_and_a_suggestion():
    assert refusal({"oven": {"haet": 1}}) == "run.toml: unknown key `oven.haet`. Did you mean `heat`?"


def test_a_key_in_the_wrong_section_is_an_error_with_the_right_one():
    message = refusal({"oven": {"flour": 1.0}})
    assert message == "run.toml: unknown key `oven.flour`. It belongs in section [dough]."


def test_a_key_outside_of_any_section_is_an_error_with_its_section():
    assert "`heat` belongs in section [oven]" in refusal({"heat": 1})


def test_an_unknown_section_is_an_error_with_a_suggestion():
    assert refusal({"ovn": {}}) == "run.toml: unknown section [ovn]. Did you mean `oven`?"


def test_a_section_that_is_no_table_is_refused():
    assert "[oven] must be a table of settings, got 3" in refusal({"oven": 3})


def test_a_wrong_type_names_the_key_and_the_value():
    message = refusal({"oven": {"heat": "hot"}})
    assert "`oven.heat` = 'hot' does not fit" in message
    assert "integer" in message


def test_a_value_out_of_range_names_the_key_the_value_and_the_range():
    message = refusal({"dough": {"flour": -1.0}})
    assert "`dough.flour` = -1.0" in message
    assert "greater than 0" in message


def test_a_wrong_choice_names_the_choices():
    message = refusal({"oven": {"shelf": "middle"}})
    assert "'middle'" in message
    assert "'top' or 'bottom'" in message


NOT_FINITE = ("inf", "-inf", "nan", math.inf, -math.inf, math.nan)


def is_float(kind):
    """Whether a setting of this type is a number, or may be."""
    return kind is float or (get_origin(kind) not in (dict, list) and any(map(is_float, get_args(kind))))


@pytest.mark.parametrize(("tree", "least"), [(RunConfig, 40), (EvalConfig, 13)])
def test_a_number_that_is_not_finite_is_refused_whatever_the_setting(tree, least):
    numbers = {name: section for name, (section, leaf) in leaves(tree).items() if is_float(leaf.annotation)}
    numbers = {name: section for name, section in numbers.items() if "prompt_data" not in name}
    assert len(numbers) >= least
    for name, section in numbers.items():
        field, variants = tree.model_fields[section].annotation.keys().owners().get(name, ("", ()))
        for value in NOT_FINITE:
            with pytest.raises(ConfigError) as caught:
                parse(
                    tree,
                    {section: {name: value} | ({field: variants[0]} if field else {})},
                    source="run.toml",
                )
            message = str(caught.value)
            assert message.startswith(f"run.toml: `{section}."), message
            assert message.endswith(f"` = {value!r} does not fit: input should be a finite number.")


def test_such_a_number_in_a_table_of_arguments_is_refused_at_its_place():
    for value in NOT_FINITE[3:]:
        message = refusal({"dough": {"extras": {"salt": [1.0, {"grams": value}]}}})
        assert message.startswith("run.toml: `dough.extras.salt.")
        assert message.endswith(f".grams` = {value!r} does not fit: input should be a finite number.")


def test_a_validators_own_message_is_unchanged():
    assert refusal({"dough": {"label": ""}}) == "run.toml: label is empty; leave it out or write something."


def test_a_configuration_is_frozen():
    with pytest.raises(ValidationError, match="frozen"):
        Bakery().oven.heat = 3


def test_place_sorts_flags_into_sections_and_refuses_unknown_ones():
    assert by_section(Bakery, {"heat": 1, "label": "x", "fan": True}) == {
        "oven": {"heat": 1, "fan": True},
        "dough": {"label": "x"},
    }
    with pytest.raises(ConfigError, match=r"unknown setting `flor`\. Did you mean `flour`\?"):
        by_section(Bakery, {"flor": 1})


def test_flags_win_over_the_file_and_leave_the_rest():
    merged = merge(Bakery, {"oven": {"heat": 1, "fan": True}}, {"oven": {"heat": 2}, "dough": {"flour": 1.0}})
    assert merged == {"oven": {"heat": 2, "fan": True}, "dough": {"flour": 1.0}}


def test_merging_leaves_the_file_as_it_was():
    base = {"oven": {"heat": 1}}
    merge(Bakery, base, {"oven": {"heat": 2}})
    assert base == {"oven": {"heat": 1}}


def test_leaf_names_are_unique_over_the_tree():
    class Twice(Section):
        """One leaf in two places."""

        first: Oven = Oven()
        other: Oven = Oven()

    with pytest.raises(ValueError, match="leaf heat is in first and in other"):
        leaves(Twice)


def test_every_leaf_has_its_section_and_its_description():
    section, field = leaves(Bakery)["flour"]
    assert (section, field.description) == ("dough", "Flour (kg).")


def test_a_missing_run_file_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match=r"there is no run file .*nowhere\.toml; check the path"):
        read_toml(tmp_path / "nowhere.toml")


@pytest.mark.parametrize(
    "content",
    [
        *(b"heat = ", b"[oven", b"\xff\xfe", b"heat: 3"),
        *(b"heat = " + b"[" * 50_000, b"heat = " + b"9" * 100_000),
    ],
    ids=["value", "table", "binary", "colon", "nested", "digits"],
)
def test_invalid_toml_is_an_error_with_the_reason(tmp_path, content):
    path = tmp_path / "run.toml"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"run\.toml is not a TOML file \("):
        read_toml(path)


def test_a_folder_or_a_path_below_a_file_is_no_run_file(tmp_path):
    with pytest.raises(ConfigError, match=r"run file|TOML file"):
        read_toml(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"run file|TOML file"):
        read_toml(tmp_path / "file" / "run.toml")


PLAIN = (
    st.none()
    | st.booleans()
    | st.integers(-(2**60), 2**60)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text()
)
VALUES = st.recursive(
    PLAIN, lambda values: st.lists(values) | st.dictionaries(st.text(), values), max_leaves=6
)
BAKERIES = st.builds(
    Bakery,
    oven=st.builds(
        Oven, heat=st.integers(-(2**60), 2**60), fan=st.booleans(), shelf=st.sampled_from(["top", "bottom"])
    ),
    dough=st.builds(
        Dough,
        flour=st.floats(min_value=0, exclude_min=True, allow_infinity=False),
        label=st.none() | st.text(min_size=1),
        extras=st.dictionaries(st.text(), VALUES),
    ),
)


def holds_null(value):
    if isinstance(value, dict | list):
        return any(map(holds_null, value.values() if isinstance(value, dict) else value))
    return value is None


@given(BAKERIES)
def test_reading_back_what_was_written_gives_an_equal_configuration(tmp_path_factory, config):
    path = tmp_path_factory.mktemp("config") / "config.toml"
    if holds_null(config.dough.extras):
        with pytest.raises(ConfigError, match=r"(?s)extras.*null"):
            write_toml(config, path)
        return
    write_toml(config, path)
    assert parse(Bakery, read_toml(path), source=str(path)) == config


class Proving(Section):
    """How the dough rises."""

    cold: bool = False
    """Prove in the fridge."""
    fridge: int = 4
    """Degrees (Celsius)."""
    fan_speed: int | None = None
    """Turns a second."""

    @property
    def without_effect(self):
        """In the warm, both."""
        return {} if self.cold else {"fridge": "without cold; add it", "fan_speed": "without cold; add it"}


class Kitchen(Section):
    """A section whose keys depend on each other."""

    proving: Proving = Proving()


@pytest.mark.parametrize("value", [4, 7])
def test_a_key_without_an_effect_is_refused_by_its_name_also_at_its_default(value):
    with pytest.raises(ConfigError) as caught:
        parse(Kitchen, {"proving": {"fridge": value}}, source="run.toml")
    message = "run.toml: fridge has no effect without cold; add it, or leave fridge out."
    assert str(caught.value) == message


def test_a_key_that_is_missing_or_off_is_not_refused():
    assert parse(Kitchen, {"proving": {"fan_speed": None}}, source="x") == Kitchen()
    assert parse(Kitchen, {"proving": {"cold": True, "fridge": 7}}, source="x").proving.fridge == 7


@pytest.mark.parametrize(
    "proving", [Proving(), Proving(cold=True, fridge=7), Proving(cold=True, fan_speed=2)]
)
def test_only_keys_with_an_effect_are_written_and_they_read_back_equal(tmp_path, proving):
    config = Kitchen(proving=proving)
    write_toml(config, tmp_path / "config.toml")
    assert parse(Kitchen, read_toml(tmp_path / "config.toml"), source="x") == config
    assert ("fridge" in effective_values(config)["proving"]) == proving.cold


@pytest.mark.parametrize("spelling", ["top", "TOP", "Top"])
def test_a_word_may_be_spelled_in_capitals(spelling):
    assert parse(Bakery, {"oven": {"shelf": spelling}}, source="run.toml").oven.shelf == "top"


@pytest.mark.parametrize(
    ("spelling", "name"),
    [
        ("GRPO", "grpo"),
        ("Dr. GRPO", "dr_grpo"),
        ("Dr.GRPO", "dr_grpo"),
        ("REINFORCE++", "reinforce_plus_plus"),
        ("REINFORCE++-baseline", "reinforce_plus_plus_baseline"),
        ("grpo-passk", "grpo_passk"),
        ("PPO", "ppo"),
    ],
)
def test_estimators_may_be_spelled_as_in_their_papers(spelling, name):
    config = parse(RunConfig, {"algorithm": {"advantage_estimator": spelling}}, source="run.toml")
    assert config.algorithm.advantage_estimator.name == name


def test_no_two_words_of_a_setting_are_spellings_of_one():
    for tree in (RunConfig, EvalConfig):
        for name, (_, leaf) in leaves(tree).items():
            words = words_of(leaf.annotation)
            assert len({plain(word) for word in words}) == len(words), name
