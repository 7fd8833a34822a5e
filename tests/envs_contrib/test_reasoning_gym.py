"""All generators of the reasoning-gym library as environments; a few of them in the quick tests."""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
import zlib

import numpy as np
import pytest
import reasoning_gym

from agentrl import ScriptedAgent, UserError, make, play
from agentrl.envs import matching
from envs_contrib.reasoning_gym.answers import READABLE, is_readable
from envs_contrib.reasoning_gym.env import NUM_QUESTIONS, ReasoningGym
from envs_contrib.reasoning_gym.generators import CHANCES, LEFT_OUT
from tests.house.source import ROOT

QUICK = ("chain_sum", "gcd", "letter_counting", "n_queens", "number_sorting", "spiral_matrix")
generators = pytest.mark.parametrize(
    "id",
    [
        pytest.param(f"ReasoningGym-{name}-v0", marks=() if name in QUICK else pytest.mark.full)
        for name in CHANCES
    ],
)


def generator_of(id):
    return id.removeprefix("ReasoningGym-").removesuffix("-v0")


def test_every_generator_of_the_library_has_an_id_or_a_reason_to_be_left_out():
    assert set(CHANCES) | set(LEFT_OUT) == set(reasoning_gym.factory.DATASETS)
    assert not set(CHANCES) & set(LEFT_OUT)
    assert matching("ReasoningGym-*") == sorted(f"ReasoningGym-{name}-v0" for name in CHANCES)


@pytest.mark.parametrize(
    ("name", "answer"), [("game_of_life_halting", "nonsense"), ("puzzle24", "6*2 + 6*2")]
)
def test_a_scorer_for_which_a_generator_is_left_out_still_pays_for_nothing(name, answer):
    dataset = reasoning_gym.create_dataset(name, seed=0, size=3)
    assert {dataset.score_answer(answer, dataset[k]) for k in range(3)} == {1.0}


@pytest.mark.full
@pytest.mark.parametrize(
    "name", [name for name, why in LEFT_OUT.items() if why == "it gives no right answer"]
)
def test_a_generator_without_a_right_answer_still_has_none(name):
    dataset = reasoning_gym.create_dataset(name, seed=0, size=3)
    assert max(dataset.score_answer(str(dataset[k]["answer"]), dataset[k]) for k in range(3)) < 0.1


@generators
async def test_the_expert_reaches_its_score_in_one_turn(id):
    env = make(id)
    assert env.expert_score == 1.0
    assert {env.grade(task, task.answer) for task in env.tasks("test")} == {1.0}
    task = env.tasks("train")[7]
    episode = await play(env, ScriptedAgent(env.expert(task)), task)
    assert episode.step_rewards == (1.0,)


@generators
def test_questions_are_the_librarys_own_and_in_one_split_only(id):
    env = make(id)
    train, test = env.tasks("train"), env.tasks("test")
    assert len(train) > len(test) / 2
    assert len(test) > 10
    prompts = [task.prompt for task in (*train, *test)]
    assert len(set(prompts)) == len(prompts)
    # Some generators draw their questions by the size of the set.
    theirs = reasoning_gym.create_dataset(generator_of(id), seed=1_000_000, size=NUM_QUESTIONS["test"])
    for ours in test[:3]:
        entry = theirs[ours.metadata["number"]]
        assert (ours.prompt[0].content, ours.answer) == (entry["question"], str(entry["answer"]))


def best_single_answer(env, num_answers):
    tasks = env.tasks("test")
    answers = sorted({"", *(task.answer for task in tasks)})[:num_answers]
    return max(statistics.fmean(env.grade(task, answer) for task in tasks) for answer in answers)


@generators
def test_no_single_answer_beats_the_declared_chance(id):
    assert best_single_answer(make(id), 20) <= make(id).chance_score + 0.02


@pytest.mark.full
@generators
def test_the_declared_chance_is_about_that_of_the_best_single_answer(id):
    assert best_single_answer(make(id), 60) <= make(id).chance_score + 0.03


@generators
def test_whatever_a_model_writes_is_scored_and_earns_little(id):
    env = make(id)
    for answer in ODD:
        scores = [env.grade(task, answer) for task in env.tasks("test")[:20]]
        if statistics.fmean(scores) > env.chance_score + 0.05:
            # It may be the right answer to several of the first questions.
            scores = [env.grade(task, answer) for task in env.tasks("test")]
        assert all(0.0 <= score <= 1.0 for score in scores)
        assert statistics.fmean(scores) <= env.chance_score + 0.05, answer


ODD = (
    *(
        "",
        " ",
        "9" * 5000,
        "[[[" * 2000,
        "\x00",
        "\ud800",
        "1/0",
        "None",
        "×",
        "nan",
        "nan+nanj",
        "inf",
        "-inf",
    ),
    *("1e999999999", "1e-999999999", "9**9**9**9", "x**9**9**9", "{}", "[]", "True", "-1", "no", "0,0"),
)


@pytest.mark.parametrize("generator", READABLE)
def test_what_a_model_writes_is_never_executed(generator, tmp_path):
    env = ReasoningGym(generator, num_test=3)
    task = env.tasks("test")[0]
    mark = tmp_path / "executed"
    for answer in (
        f"open({str(mark)!r}, 'w')",
        f"[open({str(mark)!r}, 'w')]",
        f"__import__('os').mkdir({str(mark)!r})",
        f"[x for x in [__import__('os').mkdir({str(mark)!r})]]",
        f"(lambda: __import__('os').mkdir({str(mark)!r}))()",
    ):
        assert env.grade(task, answer) < 0.1
        assert not os.path.exists(mark), answer
    assert env.grade(task, task.answer) == 1.0


@pytest.mark.parametrize(
    ("generator", "answer", "readable"),
    [
        ("countdown", "(100 - 4) * 6 / 2.5", True),
        ("countdown", "9**9", False),
        ("countdown", "exit()", False),
        ("puzzle24", "8 * 3 + 0 * 12345678901", False),
        ("polynomial_multiplication", "3*x**2 - 12*x + 4", True),
        ("polynomial_multiplication", "x**9999", False),
        ("polynomial_multiplication", "(9**9)", False),
        ("polynomial_multiplication", "exit", False),
        ("spiral_matrix", "[1, 2, -3]", True),
        ("spiral_matrix", "1 2 3", True),
        ("spiral_matrix", "[1] * 9", False),
        ("n_queens", "_ _ Q", True),
        ("n_queens", "[['_', 'Q']]", True),
        ("gcd", "exit()", True),
        ("gcd", "1e99999", False),
        ("gcd", "9" * 3000, False),
    ],
)
def test_a_scorer_reads_only_what_it_may(generator, answer, readable):
    assert is_readable(generator, answer, "7") is readable
    assert is_readable(generator, answer, answer)


def fingerprints(names):
    """A checksum of the first ten test questions of each generator, with their answers."""
    by_name = {}
    for name in names:
        dataset = reasoning_gym.create_dataset(name, seed=1_000_000, size=10)
        asked = [(dataset[k]["question"], str(dataset[k]["answer"])) for k in range(10)]
        by_name[name] = zlib.crc32(repr(asked).encode("utf-8", "replace"))
    return by_name


@pytest.mark.full
def test_the_same_seed_gives_the_same_questions_in_every_process():
    names = tuple(CHANCES)
    code = f"from {__name__} import fingerprints; import json; print(json.dumps(fingerprints({names!r})))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONHASHSEED": "7"},
    )
    # A compiler in the library prints dots.
    assert json.loads(done.stdout.lstrip(".")) == fingerprints(names)


@generators
def test_the_global_generators_are_not_touched(id):
    random.seed(1)
    np.random.seed(1)
    before = random.getstate(), np.random.get_state()[1].tolist()
    env = ReasoningGym(generator_of(id))
    env.grade(env.tasks("test")[3], "7")
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before


def test_other_settings_of_a_generator_are_arguments():
    env = ReasoningGym(generator="spell_backward", min_word_len=6, max_word_len=8)
    task = env.tasks("test")[0]
    assert task.prompt[0].content.endswith(task.answer[::-1])
    assert 6 <= len(task.answer) <= 8
    with pytest.raises(UserError, match=r"reasoning-gym makes no `gcd`: .*colour"):
        ReasoningGym("gcd", colour="red").tasks("test")


def test_an_unknown_generator_is_a_one_sentence_error():
    with pytest.raises(UserError, match="reasoning-gym makes no `mase`"):
        ReasoningGym("mase").tasks("train")


def test_the_library_is_imported_at_its_first_use_and_its_absence_is_a_one_sentence_error():
    code = (
        "import sys\n"
        "import agentrl\n"
        "env = agentrl.make('ReasoningGym-gcd-v0')\n"
        "assert 'reasoning_gym' not in sys.modules\n"
        "sys.modules['reasoning_gym'] = None\n"
        "try:\n"
        "    env.tasks('test')\n"
        "except agentrl.UserError as error:\n"
        "    print(error)\n"
    )
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert output.endswith("install it with `pip install 'agentrl[reasoning-gym]'`.\n")
