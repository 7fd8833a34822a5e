"""The names of graders: each is its own grader's, in code, in run files and on the command line."""

from __future__ import annotations

import inspect
import json

import pytest
from click.testing import CliRunner

from agentrl import ScriptedAgent, Task, UserError, play
from agentrl.assembly.env import env_factory
from agentrl.assembly.load import load_config
from agentrl.assembly.rewards import build_scorer, group_reward, reward_function
from agentrl.cli import cli
from agentrl.envs.graders import grader_names, group_grader_names, make_grader
from agentrl.envs.graders.registry import find_grader
from agentrl.envs.scoring import graded
from agentrl.errors import ConfigError, StageError
from agentrl.types import RewardParts
from tests.engine.chat.chat_server import ChatServer
from tests.envs.graders.judges import with_schemas
from tests.envs.graders.test_remote import RewardServer
from tests.envs.graders.test_text import iter_once

pytestmark = pytest.mark.usefixtures("released")
NO_COMMA = {"instruction_id_list": ["punctuation:no_comma", "startend:quotation"], "kwargs": [{}, {}]}
TESTS = '{"inputs": ["3"], "outputs": ["9"]}'
OWN_CASES = {
    "exact_match": [("The Paris!", "paris", {}, 1), ("It is Paris", "paris", {}, 0)],
    "f1": [("It is in Paris", "Paris", {}, 0.4)],
    "number": [("So it is 72.", "#### 72.0", {}, 1)],
    "choice": [("B. As (A) is wrong", "B", {}, 1), ("So (A), that is B", "B", {}, 0)],
    "gpqa": [("So it is (A)", "A", {}, 1), ("B. As (A) is wrong", "B", {}, 0)],
    "dapo": [("Answer: $72$", "72", {}, 1), (r"\boxed{72}", "72", {}, -1)],
    "math": [(r"\boxed{1/2}", "0.5", {}, 1), (r"a \boxed{0.5} </think>", "0.5", {}, 1)],
    "deepscaler": [(r"a</think> \boxed{0.5}", "0.5", {}, 1), (r"\boxed{0.5}", "0.5", {}, 0)],
    "ifeval": [('"a b"', None, NO_COMMA, 1), ('"a, b"', None, NO_COMMA, 0)],
    "code": [("print(int(input()) ** 2)", TESTS, {}, 1), ("9", TESTS, {}, 0)],
    "remote": [("four", None, {}, 4.25)],
    "judge": [("four", None, {}, 0.125)],
    "random": [("yes", "no", {}, 1), ("six", "six", {}, 0)],
    "by_row": [
        ("The Paris!", "paris", {"rm_type": "exact_match"}, 1),
        ("So it is 72.", "#### 72.0", {"rm_type": "number"}, 1),
        (r"So it is \boxed{B}", "B", {"rm_type": "boxed_exact_match"}, 1),
    ],
}
"""By name: an answer, its label, the task's metadata, the reward."""


@pytest.fixture
async def settings(monkeypatch):
    """The settings that each grader needs, with a reward model and a judge that answer."""

    def play(request):
        return {"rewards": [len(response) + 0.25 for response in request["responses"]]}

    async with (
        RewardServer(play).serving() as rewards,
        ChatServer(with_schemas(2)).serving() as chat,
    ):
        yield {"remote": {"url": rewards.url}, "judge": {"url": chat.url, "scale": [1, 9]}}


async def reward_of(name, settings, case):
    """The reward of a case by a grader; None where the case cannot be graded by it."""
    answer, label, metadata, _ = case
    try:
        return float(
            await graded(reward_function(name, settings), Task.ask("t", "?", label, **metadata), answer, 30)
        )
    except StageError:
        return None


async def test_every_name_is_its_own_grader_and_no_others(settings):
    assert set(OWN_CASES) == set(grader_names())
    for name, cases in OWN_CASES.items():
        # A coin agrees with a grader by luck; test_text.py has it alone.
        for other in (other for other in OWN_CASES if other != "random" or name == other):
            found = [await reward_of(other, settings.get(other, {}), case) for case in cases]
            assert (found == [case[-1] for case in cases]) == (other == name), (name, other, found)


SOLVABLE = {
    "exact_match": [Task.ask("t", "?", "the City of Light!"), Task.ask("t", "?", answers=["Paris"])],
    "f1": [Task.ask("t", "?", "the City of Light")],
    "number": [Task.ask("t", "?", "So it is #### 1,072.50")],
    "choice": [Task.ask("t", "?", "(C) because")],
    "gpqa": [Task.ask("t", "?", "D"), Task.ask("t", "?", "answer B", choices=["gene A", "answer B"])],
    "dapo": [Task.ask("t", "?", "72"), Task.ask("t", "?", r"\frac{1}{2}")],
    "math": [Task.ask("t", "?", "0.5"), Task.ask("t", "?", r"so \boxed{\frac{1}{2}}, or \boxed{x^{2}}")],
    "deepscaler": [Task.ask("t", "?", "0.5"), Task.ask("t", "?", answers=["}", "2"])],
    "by_row": [
        Task.ask("t", "?", "0.5", rm_type=name) for name in ("f1", "math", "boxed_number", "boxed_dapo")
    ],
}
UNSOLVABLE = {"number": "none", "dapo": "a\nb", "math": "}", "deepscaler": " ", "choice": "?"}
"""By grader: a label that is no answer of full marks in any form."""


async def test_the_expert_of_single_turn_earns_full_marks_by_every_grader_that_labels_can_satisfy(settings):
    for name in grader_names():
        kwargs = settings.get(name, {})
        env = env_factory("SingleTurn-v0", {}, reward=choice(reward=name, reward_kwargs=kwargs))()
        assert env.has_expert == (name in SOLVABLE), name
        for task in SOLVABLE.get(name, ()):
            episode = await play(env, ScriptedAgent(env.expert(task)), task, seed=0)
            assert episode.step_rewards == (env.expert_score,), (name, task)
        if name not in SOLVABLE or name in UNSOLVABLE:
            with pytest.raises(UserError, match="SingleTurn-v0 has no expert"):
                env.expert(Task.ask("t", "?", UNSOLVABLE.get(name, "four")))


def test_every_grader_has_a_docstring_and_its_settings_are_in_it():
    for name in (*grader_names(), *group_grader_names()):
        grader = find_grader(name)
        document = (
            "\n".join(cls.__doc__ or "" for cls in inspect.getmro(grader)) if inspect.isclass(grader) else ""
        )
        missing = [
            setting
            for setting in (inspect.signature(grader).parameters if inspect.isclass(grader) else ())
            if setting not in document and name != "pairwise"
        ]
        assert (name, inspect.getdoc(grader) is None, missing) == (name, False, [])


def choice(**settings):
    return load_config(None, settings).env


async def test_a_run_names_a_grader_and_its_settings():
    task = Task.ask("t", "?", "0.5")
    chosen = choice(env="SingleTurn-v0", reward="deepscaler", reward_kwargs={"after_think": False})
    env = env_factory("SingleTurn-v0", {}, reward=chosen)()
    episode = await play(env, ScriptedAgent(iter_once(r"\boxed{0.5}")), task, seed=0)
    assert episode.step_rewards == (1.0,)
    assert episode.step_rewards[0].parts == {"grader_timeout": 0.0}
    strict = env_factory("SingleTurn-v0", {}, reward=choice(reward="deepscaler"))()
    assert (await play(strict, ScriptedAgent(iter_once(r"\boxed{0.5}")), task, seed=0)).step_rewards == (0.0,)
    scorer = await build_scorer(
        choice(group_reward="diversity", group_reward_kwargs={"weight": 0.5}), lambda: env, None
    )
    assert [(reward.name, reward.weight) for reward in scorer.rewards] == [("diversity", 0.5)]


async def test_a_served_model_is_a_judge_by_its_name():
    async with ChatServer(with_schemas(10)).serving() as server:
        addresses = {"big": server.url.removesuffix("/v1")}
        reward = reward_function("judge", {"url": "sglang_models.big"}, addresses)
        assert await reward(Task.ask("t", "?"), "answer") == 1
        assert group_reward("pairwise", {"url": "sglang_models.big"}, addresses).name == "pairwise"
    with pytest.raises(ConfigError, match=r"`sglang_models.bog` is no model of this run"):
        reward_function("judge", {"url": "sglang_models.bog"}, addresses)


async def test_a_grader_that_cannot_work_is_refused_before_anything_is_played():
    def nothing():
        raise AssertionError("it is made too late")

    for settings, sentence in [
        ({"reward": "ifeval"}, "ifeval: the reward of the answer '0.5' failed .task t has no metadata"),
        (
            {"reward": "remote", "reward_kwargs": {"url": "http://127.0.0.1:1", "attempts": 1}},
            "remote: .*failed",
        ),
        (
            {"reward": "judge"},
            "grader `judge`: missing a required argument: 'url'; it takes url, model, rubric",
        ),
    ]:
        with pytest.raises(UserError, match=sentence) as caught:
            await build_scorer(choice(**settings), nothing, Task.ask("t", "?", "0.5"))
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"reward_kwargs": {"timeout_s": 1}}, "reward_kwargs has no effect without reward; add it"),
        (
            {"reward": "a:b", "reward_kwargs": {"x": 1}},
            "has no effect with reward = a:b, a function by its path",
        ),
        ({"group_reward_kwargs": {"n": 1}}, "group_reward_kwargs has no effect without group_reward; add it"),
        ({"rm_type": "math", "reward": "dapo"}, "both set reward; choose one"),
    ],
)
def test_settings_without_effect_are_refused_by_name(settings, sentence):
    with pytest.raises(ConfigError, match=sentence):
        choice(**settings)


def test_spellings_of_other_tools_name_graders():
    assert choice(rm_type="math") == choice(reward="math")
    url = "http://127.0.0.1:5000/get_reward"
    remote = choice(reward="remote", reward_kwargs={"url": url})
    assert choice(rm_url=url) == choice(rm_type="remote_rm", rm_url=url) == remote


@pytest.mark.parametrize(
    ("grade", "total", "parts"),
    [
        (RewardParts({"a": 1.0}, total=0.0), 0.0, {"a": 1.0}),
        (RewardParts({"a": 1.0, "b": 2.0}), 3.0, {"a": 1.0, "b": 2.0}),
        ({"a": 1.0, "b": 2.0}, 3.0, {"a": 1.0, "b": 2.0}),
    ],
)
async def test_parts_of_a_grade_are_kept_and_summed_only_where_they_are_the_grade(grade, total, parts):
    reward = await graded(lambda task, answer: grade, Task.ask("t", "?"), "", None)
    assert (reward, reward.parts) == (total, parts)
    with pytest.raises(StageError, match="the part `a` of the reward is nan"):
        await graded(
            lambda task, answer: RewardParts({"a": float("nan")}, total=0.0), Task.ask("t", "?"), "", None
        )


def run(*arguments, **options):
    return CliRunner().invoke(cli, ["graders", *arguments], **options)


def test_the_command_line_lists_graders_with_their_settings():
    rows = {row["name"]: row for row in json.loads(run("list", "--json").output)}
    assert [*rows] == [*grader_names(), *group_grader_names()]
    assert rows["math"]["settings"]["timeout_s"] == "float = 5.0"
    assert rows["pairwise"]["setting"] == "group_reward"
    assert all(row["description"].endswith((".", "1.0")) for row in rows.values())
    assert "exact_match" in run("list").output


def test_the_command_line_grades_an_answer():
    graded = json.loads(run("grade", "dapo", "Answer: 7", "--label", "7").output)
    assert graded == {"reward": 1.0, "parts": {"right": 1.0}}
    graded = run("grade", "ifeval", "-", "--metadata", json.dumps(NO_COMMA), input='"a, b"')
    assert json.loads(graded.output) == {"reward": 0.0, "parts": {"instructions": 0.5}}
    kwargs = json.dumps({"score": "share"})
    graded = run("grade", "ifeval", '"a, b"', "--metadata", json.dumps(NO_COMMA), "--reward-kwargs", kwargs)
    assert json.loads(graded.output)["reward"] == 0.5
    assert isinstance(run("grade", "maths", "x").exception, ConfigError)


def test_a_grader_without_settings_refuses_any():
    with pytest.raises(UserError, match="the grader `f1` takes no settings, got"):
        make_grader("f1", n=1)
