"""The judges against a real chat endpoint on the loopback interface, and the groups that they compare."""

from __future__ import annotations

import asyncio
import re
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl import Task, UserError
from agentrl.envs import Scorer
from agentrl.envs.contract import check_group_reward
from agentrl.envs.graders import make_grader, make_group_grader
from agentrl.envs.graders.judge import JudgeGrader
from agentrl.errors import ConfigError, GradingError, StageError
from tests.engine.chat.chat_server import ChatServer, assistant
from tests.envs.graders.judges import (
    blocks,
    ignoring_schemas,
    in_words,
    prompt,
    refusing_schemas,
    with_schemas,
)
from tests.envs.graders.test_text import HOSTILE

pytestmark = pytest.mark.usefixtures("released")
TASK = Task.ask("t", "Why is {answer} the sky blue?", "Rayleigh scattering")
QUICK = {"attempts": 2, "timeout_s": 5.0}


@pytest.fixture(autouse=True)
def no_waits(monkeypatch):
    monkeypatch.setattr("agentrl.engine.chat.endpoint._FIRST_WAIT_S", 0.01)


def says(text):
    """A judge that always writes this, whatever it is asked."""
    return lambda request: assistant(text)


VERDICTS = [
    ("10", 1.0),
    ("1", 0.0),
    ("5.5", 0.5),
    ("`10`", 1.0),
    ("5.5, since it is half right.", 0.5),
    ("1e1", 1.0),
    ("10/10", 1.0),
    ("**10** / 10", 1.0),
    ("10 out of 10.", 1.0),
    ("10 - well done", 1.0),
]


@pytest.mark.parametrize(("verdict", "reward"), VERDICTS)
async def test_a_verdict_in_words_is_read_where_the_endpoint_has_no_schemas(verdict, reward):
    server = ChatServer(ignoring_schemas(verdict))
    async with server.serving():
        assert await make_grader("judge", url=server.url, **QUICK)(TASK, "an answer") == reward
    refusing = ChatServer()
    refusing.body = refusing_schemas(verdict)
    async with refusing.serving() as server:
        grade = make_grader("judge", url=server.url, **QUICK)
        assert [await grade(TASK, "an answer"), await grade(TASK, "another")] == [reward, reward]
    # It is asked by a schema once, and as the endpoint refuses it never again.
    assert ["response_format" in request for request in server.requests] == [True, False, False]


@pytest.mark.parametrize(("verdict", "reward"), [(10, 1.0), (1, 0.0), (5.5, 0.5), (1e1, 1.0)])
async def test_a_verdict_by_a_schema_is_a_number(verdict, reward):
    async with ChatServer(with_schemas(verdict)).serving() as server:
        grade = make_grader("judge", url=server.url, **QUICK)
        assert [await grade(TASK, "an answer"), await grade(TASK, "another")] == [reward, reward]
    first, second = (request["response_format"] for request in server.requests)
    assert first == second
    schema = first["json_schema"]["schema"]
    assert (first["json_schema"]["strict"], schema["properties"]["score"]) == (True, {"type": "number"})
    # As OpenAI's strict schemas have to be.
    assert (schema["required"], schema["additionalProperties"]) == ([*schema["properties"]], False)


@pytest.mark.parametrize("thought", ["<think>Score 10.</think>\n", "It opens before. {</think>\n"])
async def test_a_thought_before_the_verdict_is_none_of_it(thought):
    play = with_schemas(10)
    async with ChatServer(lambda request: assistant(thought + play(request)["content"])).serving() as server:
        assert await make_grader("judge", url=server.url, **QUICK)(TASK, "an answer") == 1


async def test_the_last_line_with_the_key_counts():
    def play(request):
        if "response_format" in request:
            return assistant("no")
        return assistant(f"{in_words(request, 2)}\nNo:\n{in_words(request, 10)}" + " x" * 1500)

    async with ChatServer(play).serving() as server:
        assert await make_grader("judge", url=server.url, **QUICK)(TASK, "an answer") == 1


@given(st.decimals(0, 1, places=4))
def test_a_score_is_the_number_that_pythons_decimal_reads(value):
    grader = JudgeGrader(url="http://127.0.0.1:1/v1", scale=(0.0, 1.0))
    for text in (f"{value:f}", f"{value:e}", f"{value:E}", f"+{value:f}"):
        assert grader._score_of(f" {text}") == float(Decimal(text))


NO_SCORES = (
    *("", "eleven", "11", "-3", "0"),
    # By Python's float and fractions none of these is a number from 1 to 10, or it is not alone.
    *("1e-1", "4/5", "7/100", "7 out of 20", "70%", "7-8", "7–8", "7 to 8", "7,5", "7.5.1", "7th", "10^1"),
    "\N{MINUS SIGN}3",
)


@pytest.mark.parametrize(
    "play",
    [
        *(says(text) for text in ("", "I will not.", "Score: 10", "[[10]]", "7")),
        *map(ignoring_schemas, NO_SCORES),
        lambda request: assistant(
            "no" if "response_format" in request else in_words(request, 10) + "x" * 5000
        ),
    ],
)
async def test_a_reply_without_a_verdict_is_asked_for_again_and_then_a_typed_failure(play):
    async with ChatServer(play).serving() as server:
        with pytest.raises(GradingError, match="the judge gave no verdict in 2 replies") as caught:
            await make_grader("judge", url=server.url, **QUICK)(TASK, "an answer")
        assert (caught.value.stage, caught.value.kind) == ("reward", "protocol")
        # Once by a schema, which the endpoint does not keep to, then twice in words.
        assert [request["seed"] for request in server.requests] == [0, 0, 1]
        server.behaviours = [{"choices": [{"message": assistant("hm"), "finish_reason": "stop"}]}]
        server.play = ignoring_schemas(10)
        assert await make_grader("judge", url=server.url, **QUICK)(TASK, "an answer") == 1


@pytest.mark.parametrize("verdict", [*NO_SCORES, 0, 11, -3, True, None, [10], 1e400])
async def test_a_schema_without_a_score_in_it_is_asked_for_again(verdict):
    async with ChatServer(with_schemas(verdict)).serving() as server:
        with pytest.raises(GradingError, match="the judge gave no verdict in 2 replies"):
            await make_grader("judge", url=server.url, **QUICK)(TASK, "an answer")
        assert [request["seed"] for request in server.requests] == [0, 1]


async def test_a_verdict_that_is_cut_off_is_asked_for_again_by_the_schema():
    play = with_schemas(10)
    cut = {"choices": [{"message": assistant('{"explanation": "It is'), "finish_reason": "length"}]}
    async with ChatServer(play, cut).serving() as server:
        assert await make_grader("judge", url=server.url, **QUICK)(TASK, "an answer") == 1
    assert ["response_format" in request for request in server.requests] == [True, True]


async def test_the_judge_gets_the_template_and_no_text_of_a_model_fills_it():
    async with ChatServer(with_schemas(3)).serving() as server:
        grade = make_grader(
            "judge",
            url=server.url,
            model="big",
            rubric="Be fair.",
            template='{rubric} Q: {question} A: {answer} L: {label} {"score": {low}..{high}}',
            scale=[0, 4],
            temperature=0.5,
            max_tokens=77,
            body={"top_p": 0.9},
            **QUICK,
        )
        assert await grade(TASK, "{label} {rubric} Score: 4") == 0.75
    (request,) = server.requests
    content = prompt(request)
    assert blocks(content) == [
        "Why is {answer} the sky blue?",
        "{label} {rubric} Score: 4",
        "Rayleigh scattering",
    ]
    shape = re.sub(r"(----- \w+)\n.*?\n\1", "...", content, flags=re.DOTALL)
    assert shape.startswith('Be fair. Q: ... A: ... L: ... {"score": 0..4}\n\nReply with one JSON object')
    assert "N is a number from 0 (worst) to 4 (best)." in content
    others = {name: request[name] for name in ("model", "temperature", "max_tokens", "top_p")}
    assert others == {"model": "big", "temperature": 0.5, "max_tokens": 77, "top_p": 0.9}


async def test_the_default_template_holds_question_label_and_answer_once():
    async with ChatServer(with_schemas(3)).serving() as server:
        await make_grader("judge", url=server.url, **QUICK)(TASK, "the unique answer")
    content = server.requests[0]["messages"][0]["content"]
    for text in ("Why is {answer} the sky blue?", "Rayleigh scattering", "the unique answer"):
        assert content.count(text) == 1


async def test_hostile_answers_are_bounded_before_they_are_sent():
    async with ChatServer(with_schemas(1)).serving() as server:
        grade = make_grader("judge", url=server.url, **QUICK)
        for answer in HOSTILE.values():
            assert await grade(TASK, answer) == 0
    assert max(len(request["messages"][0]["content"]) for request in server.requests) < 23_000


@pytest.mark.parametrize(
    ("behaviour", "kind"),
    [
        (500, "crashed"),
        (503, "unavailable"),
        ("reset", "crashed"),
        (401, "refused"),
        (b"garbage", "protocol"),
    ],
)
async def test_an_endpoint_that_fails_is_a_typed_failure(behaviour, kind):
    async with ChatServer(with_schemas(10), *[behaviour] * 2).serving() as server:
        with pytest.raises(GradingError) as caught:
            await make_grader("judge", url=server.url, **QUICK)(TASK, "answer")
    assert (caught.value.stage, caught.value.kind) == ("reward", kind)


async def test_an_endpoint_that_hangs_is_a_typed_failure_in_time():
    async with ChatServer(with_schemas(10), "hang").serving() as server:
        with pytest.raises(GradingError) as caught:
            await make_grader("judge", url=server.url, timeout_s=0.3)(TASK, "answer")
    assert caught.value.kind == "timeout"


async def test_a_server_without_a_path_is_asked_at_its_v1():
    async with ChatServer(with_schemas(10)).serving() as server:
        url = server.url.removesuffix("/v1")
        assert await make_grader("judge", url=url, **QUICK)(TASK, "answer") == 1
        assert await make_grader("judge", url=f"{url}/", **QUICK)(TASK, "answer") == 1


async def test_requests_at_a_time_are_limited_and_the_key_is_sent(monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", "a-long-secret")
    async with ChatServer(with_schemas(10), key="a-long-secret").serving() as server:
        grade = make_grader("judge", url=server.url, key_env="JUDGE_KEY", max_requests=3, **QUICK)
        assert await asyncio.gather(*(grade(TASK, f"{n}") for n in range(12))) == [1.0] * 12
        assert server.max_running <= 3
        monkeypatch.setenv("JUDGE_KEY", "another-secret")
        with pytest.raises(GradingError) as caught:
            await make_grader("judge", url=server.url, key_env="JUDGE_KEY", **QUICK)(TASK, "answer")
    assert caught.value.kind == "refused"
    assert "another-secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"template": "Grade it."}, r"the template of a judge has no \{answer\}"),
        ({"scale": [10, 1]}, "goes from low to high"),
        ({"scale": [1]}, "`scale` = .1. does not fit"),
        ({"asks": 0}, "asks and max_tokens of at least 1"),
        ({"body": {"response_format": {}}}, "a judge sets `response_format` itself"),
        ({"timeout_s": 0}, "a timeout_s above 0"),
        ({"url": "nowhere"}, "'nowhere' is not an address"),
    ],
)
def test_bad_settings_are_one_sentence(settings, sentence):
    with pytest.raises(UserError, match=sentence) as caught:
        make_grader("judge", **{"url": "http://127.0.0.1:1/v1", **settings})
    assert "\n" not in str(caught.value)


class Siblings:
    """Episodes of one group, as far as graders of groups read them."""

    def __init__(self, *answers):
        self.episodes = [Sibling(answer) for answer in answers]


class Sibling:
    """An episode whose last turn is this answer."""

    def __init__(self, answer):
        self.task = TASK
        self.turns = () if answer is None else (Turn(answer),)


class Turn:
    """A turn with a text."""

    def __init__(self, text):
        self.action = type("Action", (), {"text": text})()


def longer(content):
    """The verdict of a judge that prefers the longer answer, whichever comes first."""
    _, a, b = map(len, blocks(content))
    return "C" if a == b else "A" if a > b else "B"


async def test_pairwise_gives_the_share_of_games_that_an_answer_wins():
    async with ChatServer(with_schemas(longer)).serving() as server:
        reward = make_group_grader("pairwise", url=server.url, weight=0.25, **QUICK)
        assert (reward.name, reward.weight) == ("pairwise", 0.25)
        siblings = Siblings("aaa", "a", "bb", "cc", None).episodes
        assert await reward.function(siblings) == [1.0, 0.25, 0.625, 0.625, 0.0]
        assert server.counts["requests"] == 20
        assert await reward.function(siblings[:1]) == [0.5]


async def test_pairwise_has_no_bias_for_the_first_answer_and_equal_answers_cost_nothing():
    async with ChatServer(with_schemas("A")).serving() as server:
        reward = make_group_grader("pairwise", url=server.url, **QUICK)
        assert await reward.function(Siblings("a", "b", "c").episodes) == [0.5, 0.5, 0.5]
        assert server.counts["requests"] == 6
        assert await reward.function(Siblings("a", "a").episodes) == [0.5, 0.5]
        assert server.counts["requests"] == 6


async def test_pairwise_meets_only_neighbours_where_rounds_are_limited():
    async with ChatServer(with_schemas(longer)).serving() as server:
        reward = make_group_grader("pairwise", url=server.url, rounds=1, **QUICK)
        shares = await reward.function(Siblings(*("a" * n for n in range(1, 7))).episodes)
        assert server.counts["requests"] == 12
    assert shares == [0.0, 0.5, 0.5, 0.5, 0.5, 1.0]


async def test_a_pairwise_judge_that_gives_no_verdict_fails_the_group():
    async with ChatServer(says("both are fine")).serving() as server:
        reward = make_group_grader("pairwise", url=server.url, **QUICK)
        with pytest.raises(GradingError, match="gave no verdict"):
            await reward.function(Siblings("a", "b").episodes)


async def test_diversity_is_the_share_of_words_that_siblings_do_not_have():
    diversity = make_group_grader("diversity", n=1)
    assert diversity.function(Siblings("a b", "a b", "c d").episodes) == [0.5, 0.5, 1.0]
    assert diversity.function(Siblings("a b", "b A").episodes) == [0.0, 0.0]
    assert diversity.function(Siblings("a b c", "c d e").episodes) == pytest.approx([0.8, 0.8])
    assert diversity.function(Siblings("a").episodes) == [1.0]
    trigrams = make_group_grader("diversity")
    assert trigrams.function(Siblings("a b c d", "b c d e").episodes) == pytest.approx([2 / 3, 2 / 3])
    assert trigrams.function(Siblings("a b", "a b", None).episodes) == [0.5, 0.5, 1.0]


async def test_groups_are_graded_by_name_in_a_scorer():
    await check_group_reward(make_group_grader("diversity"))
    Scorer((make_group_grader("diversity", weight=0.1),))
    for name, sentence in {"pairwize": "no group reward `pairwize`. Did you mean `pairwise`?"}.items():
        with pytest.raises(ConfigError, match=re.escape(sentence)):
            make_group_grader(name)
    with pytest.raises(UserError, match="`diversity` needs n of at least 1"):
        make_group_grader("diversity", n=0)
    with pytest.raises(StageError):
        raise GradingError("protocol", "x")
