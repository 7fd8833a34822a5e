"""ReTool: the generator against its own programs, the protocol, the reward, and what may not pay."""

from __future__ import annotations

import ast
import json
import random
import re
from collections import Counter

import pytest
import pytest_asyncio

from agentrl import ScriptedAgent, Task, UserError, call, play, say
from agentrl.data import Columns, FileSource
from agentrl.envs import inline_text
from agentrl.errors import GradingError
from agentrl.tools import release_shared
from agentrl.types import Ending
from envs_contrib.retool import ReTool, env
from envs_contrib.retool.problem import LEVELS
from envs_contrib.retool.problems import MAKERS, NUM_PROBLEMS, problems

KINDS = {
    **dict.fromkeys(("power", "two_powers"), "easy"),
    **dict.fromkeys(("primes", "divisors", "divisible", "congruences", "recurrence", "collatz"), "medium"),
    **dict.fromkeys(("coins", "paths", "subsets", "partitions", "words", "knapsack", "josephus"), "hard"),
}


pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module", autouse=True)
async def _released():
    """One sandbox for all tests: the event loop of the module has it."""
    yield
    await release_shared()


def run_cells(cells) -> object:
    """The value of the last expression of programs that share their variables, as a console has it."""
    variables: dict[str, object] = {}
    value: object = None
    for cell in cells:
        tree = ast.parse(cell)
        last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, "cell", "exec"), variables)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), "cell", "eval"), variables)
    return value


@pytest.mark.parametrize("level", LEVELS)
async def test_the_answers_are_those_of_the_programs(level):
    each = 40 if level == "easy" else 5
    by_kind: dict[str, list] = {}
    for problem in problems(3, level, "test"):
        by_kind.setdefault(problem.kind, []).append(problem)
    assert set(by_kind) == {kind for kind, of_level in KINDS.items() if of_level == level}
    assert len(by_kind) == len(MAKERS[level])
    for chosen in by_kind.values():
        for problem in chosen[:each]:
            assert run_cells(problem.cells) == problem.answer, problem.text


async def test_splits_share_no_problem_and_the_seed_gives_them():
    splits = {split: ReTool().tasks(split) for split in ReTool.splits}
    texts = {split: {task.prompt[0].text for task in tasks} for split, tasks in splits.items()}
    assert {split: len(found) for split, found in texts.items()} == {
        split: sum(numbers.values()) for split, numbers in NUM_PROBLEMS.items()
    }
    assert len(set().union(*texts.values())) == sum(map(len, texts.values()))
    assert problems.__wrapped__(0, "medium", "test") == problems(0, "medium", "test")
    assert problems(0, "medium", "test") != problems(1, "medium", "test")
    for task in splits["test"]:
        assert int(task.answer) > 1
        assert task.answer not in re.findall(r"\d+", task.prompt[0].text)
    first = Counter(task.metadata["level"] for task in splits["test"][:200])
    assert set(first) == set(LEVELS)


async def test_no_constant_answer_earns_much():
    for level in LEVELS:
        answers = Counter(task.answer for task in ReTool(level).tasks("test"))
        assert answers.most_common(1)[0][1] / answers.total() < 0.05


async def test_the_expert_solves_every_kind_in_the_sandbox():
    tasks = {task.metadata["kind"]: task for task in ReTool().tasks("validation")}
    assert set(tasks) == set(KINDS)
    for task in tasks.values():
        retool = ReTool()
        episode = await play(retool, ScriptedAgent(retool.expert(task)), task)
        assert episode.ending is Ending.COMPLETED, episode.failure
        assert episode.step_rewards[-1] == 1.0
        assert episode.tools["code"].calls == len(task.metadata["cells"])


async def test_variables_stay_in_an_episode_and_only_with_state():
    task = next(task for task in ReTool("easy").tasks("test") if len(task.metadata["cells"]) == 2)
    rewards = {}
    for stateful in (True, False):
        retool = ReTool("easy", python={"stateful": stateful})
        episode = await play(retool, ScriptedAgent(retool.expert(task)), task)
        rewards[stateful] = episode.step_rewards[-1]
        second = episode.turns[2].observation[0].text
        assert ("NameError" in second) == (not stateful)
    assert rewards == {True: 1.0, False: 0.0}


async def test_the_form_is_retools():
    retool = ReTool()
    task = Task.ask("t", "What is 6 times 7?", "42")
    prompt, _ = await retool.reset(task, seed=0)
    assert prompt[0].text.endswith("\n\nWhat is 6 times 7?")
    for tag in ("<code>", "<interpreter>", "<answer>\\boxed{...}</answer>"):
        assert tag in prompt[0].text
    text = "Let me compute.\n<code>\n```python\nprint(6 * 7)\n```\n</code>"
    step = await retool.step(inline_text.read(text, retool.tool_schemas, retool.dialect))
    shown = retool.dialect.framed(step.observation[0].text)
    assert shown == "\n\n<interpreter>\n42\n</interpreter>\n\n"
    text = "So it is <answer>\\boxed{42}</answer>"
    step = await retool.step(inline_text.read(text, retool.tool_schemas, retool.dialect))
    assert (step.reward, step.terminated) == (1.0, True)
    await retool.close()


async def test_the_chat_form_has_a_python_tool_and_no_tags():
    retool = ReTool(form="chat")
    task = retool.tasks("test")[0]
    assert [schema.name for schema in retool.tool_schemas] == ["python"]
    prompt, _ = await retool.reset(task, seed=0)
    assert [schema.name for schema in retool.tool_schemas] == ["python"]
    assert "<" not in prompt[0].text.replace(task.prompt[0].text, "")
    step = await retool.step(call("python", code="x = 20\nx + 1"))
    assert step.observation[0].text == "21"
    await retool.close()
    bare, _ = await ReTool(instructions=False).reset(task, seed=0)
    assert bare == task.prompt


ANSWERS = {
    "\\boxed{1042}": 1.0,
    "It is \\boxed{ 1042 }.": 1.0,
    "\\boxed{7} no, \\boxed{1042}": 1.0,
    "\\boxed{+1042}": 1.0,
    "\\boxed{01042}": 1.0,
    "\\boxed{1042.0}": 1.0,
    "\\boxed{\\frac{2084}{2}}": 1.0,
    "1042": 0.0,
    "": 0.0,
    "\\boxed{}": 0.0,
    "\\boxed{1042": 0.0,
    "\\boxed{-1042}": 0.0,
    "\\boxed{1042} or \\boxed{7}": 0.0,
    "\\boxed{1042} or \\boxed{7": 0.0,
    "Answer: 1042": 0.0,
    "\\boxed{10 42 7}": 0.0,
    "x" * 100_000: 0.0,
}


async def test_only_the_right_answer_in_the_last_box_pays():
    task = Task.ask("t", "?", "1042")
    assert {answer: await ReTool().reward(task, answer) for answer in ANSWERS} == ANSWERS
    with pytest.raises(GradingError, match="t: the task has no label"):
        await ReTool().reward(Task.ask("t", "?", None), "\\boxed{1}")
    several = Task.ask("t", "?", "1", answers=["1", "\\frac{1}{3}"])
    assert await ReTool().reward(several, "\\boxed{1/3}") == 1.0
    assert await ReTool().reward(several, "\\boxed{2/3}") == 0.0


BREAKING = {
    "while True: pass": "cpu",
    "import time; time.sleep(60)": "timeout",
    "import os; os.abort()": "signal",
    "import os; os._exit(0)": "ended",
    "x = [bytes(10**6) for _ in range(10**6)]": "error",
    "while True: print('x' * 10**6)": "timeout",
    "1 / 0": "error",
}


async def test_breaking_the_tool_is_scored_and_pays_nothing():
    limits = {"wall_s": 0.6, "cpu_s": 0.4, "memory_mb": 64}
    task = ReTool("easy").tasks("test")[0]
    for code, kind in BREAKING.items():
        retool = ReTool("easy", python=limits)

        def script(code=code):
            yield call("code", code=code)
            yield say("\\boxed{0}")

        episode = await play(retool, ScriptedAgent(script()), task)
        assert episode.failure is None
        assert episode.step_rewards[-1] == 0.0
        assert set(episode.tools["code"].rejected) <= {kind, "timeout", "cpu"}, code
        assert episode.tools["code"].rejected


async def test_the_control_runs_programs_and_returns_nothing():
    task = ReTool("easy").tasks("test")[0]
    retool = ReTool("easy", silent=True)
    assert retool.tool_schemas == ReTool("easy").tool_schemas
    episode = await play(retool, ScriptedAgent(retool.expert(task)), task)
    assert {message.text for turn in episode.turns[1:] for message in turn.observation} == {""}
    assert episode.step_rewards[-1] == 0.0
    retool = ReTool("easy", silent=True)
    await retool.reset(task, seed=0)
    assert (await retool.step(call("code", code="1 / 0"))).observation[0].text == ""
    await retool.close()


# Of DAPO-Math-17k (arXiv:2503.14476), as published.
DAPO_PROMPT = (
    "Solve the following math problem step by step. The last line of your response should be of the form "
    "Answer: $Answer (without quotes) where $Answer is the answer to the problem.\n\n{}\n\n"
    'Remember to put your answer on its own line after "Answer:".'
)


async def test_rows_of_dapo_and_aime_are_problems(tmp_path):
    rows = {
        "dapo.jsonl": (
            {
                "prompt": [{"role": "user", "content": DAPO_PROMPT.format("What is $2^{10}$?")}],
                "reward_model": {"ground_truth": "1024"},
            },
            Columns("prompt", "reward_model.ground_truth"),
        ),
        "aime.jsonl": ({"problem": "What is $2^{10}$?", "answer": 1024}, Columns("problem", "answer")),
    }
    for name, (row, columns) in rows.items():
        (tmp_path / name).write_text(json.dumps(row) + "\n")
        task = FileSource(str(tmp_path / name), columns).task(0)
        retool = ReTool()
        prompt, _ = await retool.reset(task, seed=0)
        assert "What is $2^{10}$?" in prompt[-1].text
        await retool.step(call("code", code="2**10"))
        assert (await retool.step(say("\\boxed{1024}"))).reward == 1.0
        await retool.close()
        # The last line that DAPO's prompt asks for.
        for answer, right in (("Answer: 1024", 1), ("Answer: $1024$", 1), ("Answer: 1", 0), ("1024", 0)):
            reward = await retool.reward(task, f"Hence.\n{answer}")
            assert reward == (right if name == "dapo.jsonl" else 0), answer
        assert await retool.reward(task, "\\boxed{1}\nAnswer: 1024") == 0
        with pytest.raises(UserError, match="expert for its own problems only"):
            retool.expert(task)


async def test_demonstrations_err_at_their_rates():
    counts: Counter[str] = Counter()
    retool, rng = ReTool("easy"), random.Random(0)
    tasks = retool.tasks("demo")[:3000]
    for task in tasks:
        cells = task.metadata["cells"]
        script = retool.demonstrator(task, rng)
        action, calls = next(script), []
        while action.tool_calls:
            calls.append(action.tool_calls[0].arguments["code"])
            action = script.send("-5")
        counts["at once"] += not calls
        counts["first cells"] += bool(calls)
        counts["first wrong"] += bool(calls) and calls[0] != cells[0]
        counts["of two"] += bool(calls) and len(cells) == 2
        counts["stopped"] += len(calls) == 1 and len(cells) == 2
        counts["wrong number"] += bool(calls) and action.text != "\\boxed{-5}"
    rates = {
        "at once": (counts["at once"], len(tasks), env.ANSWER_AT_ONCE),
        "first wrong": (counts["first wrong"], counts["first cells"], env.WRONG_CELL),
        "stopped": (counts["stopped"], counts["of two"], env.STOP_AFTER_FIRST_CELL),
        "wrong number": (counts["wrong number"], counts["first cells"], env.WRONG_NUMBER),
    }
    for name, (count, total, rate) in rates.items():
        assert abs(count / total - rate) < 4 * (rate * (1 - rate) / total) ** 0.5, name


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"level": "impossible"}, "no level `impossible`; it has easy, medium, hard"),
        ({"form": "xml"}, "no form `xml`; write `tags` or `chat`"),
        ({"python": {"wall": 3}}, "wall"),
        ({"python": {"wall_s": -1}}, "wall_s above 0"),
    ],
)
async def test_wrong_arguments_are_named(arguments, sentence):
    with pytest.raises(UserError, match=sentence):
        ReTool(**arguments)


async def test_an_unknown_split_is_a_one_sentence_error():
    with pytest.raises(UserError, match="no split `dev`; it has demo, train, validation, test"):
        ReTool().tasks("dev")
