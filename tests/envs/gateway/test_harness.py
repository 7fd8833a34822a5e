"""Agents with a loop of their own: their episodes are recorded, ended, graded and replaced as any other's."""

from __future__ import annotations

import asyncio
import json

import pytest

from agentrl import ScriptedAgent, play
from agentrl.algorithms.samples import samples_of
from agentrl.errors import StageError, ToolError
from agentrl.types import Ending, Restart
from tests.envs.gateway.worlds import ASK, TOOL, adds, episode_of, post, says

CHAT = "/chat/completions"


async def calculator(url, key, task):
    """The usual loop of an agent with tools."""
    messages = [{"role": "user", "content": task.prompt[0].text}]
    while True:
        reply = await post(url, CHAT, key, {"model": "m", "messages": messages, "tools": [TOOL]})
        message = reply.json()["choices"][0]["message"]
        messages.append(message)
        if not message.get("tool_calls"):
            return message["content"]
        for call in message["tool_calls"]:
            arguments = json.loads(call["function"]["arguments"])
            total = str(arguments["a"] + arguments["b"])
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": total})


async def test_an_agent_with_its_own_loop_is_played_and_graded():
    episode, policy = await episode_of(calculator, says("", adds(2, 3), adds(1, 1)), says("5"))
    assert (episode.failure, episode.ending) == (None, Ending.COMPLETED)
    assert episode.rewards_of() == (None, 1.0)
    assert episode.counts == {"requests": 2}
    (sample,) = samples_of(episode)
    (first, said), (second, answered) = policy.asked
    assert sample.token_ids.tolist() == [*second, *answered]
    assert second[: len(first) + len(said)] == (*first, *said)
    trained = sample.token_ids[sample.loss_mask].tolist()
    assert trained == [*said, *answered]
    assert policy.closed == 1


async def ask(url, key, *texts, **fields):
    messages = [{"role": "user", "content": text} for text in texts or ("How many?",)]
    return await post(url, CHAT, key, {"model": "m", "messages": messages, **fields})


async def fails_first(url, key, task):
    raise KeyError("no such setting")


async def fails_later(url, key, task):
    await ask(url, key)
    raise ValueError("the model has said nonsense")


async def leaves(url, key, task):
    await ask(url, key)
    raise SystemExit(3)


async def hangs(url, key, task):
    await ask(url, key)
    await asyncio.sleep(60)


async def hangs_first(url, key, task):
    await asyncio.sleep(60)


async def loses_its_world(url, key, task):
    await ask(url, key)
    raise ToolError("unavailable", "the search server is gone")


async def answers_nothing(url, key, task):
    await ask(url, key)


async def answers_a_number(url, key, task):
    await ask(url, key)
    return 5


@pytest.mark.parametrize(
    ("agent", "failure", "ending", "count"),
    [
        (fails_first, ("program", "invalid"), Ending.FAILED, "agent_failures"),
        (hangs_first, ("program", "invalid"), Ending.FAILED, "agent_timeouts"),
        (loses_its_world, ("tool", "unavailable"), Ending.FAILED, None),
        (answers_a_number, ("program", "invalid"), Ending.FAILED, None),
        (fails_later, None, Ending.COMPLETED, "agent_failures"),
        (leaves, None, Ending.COMPLETED, "agent_failures"),
        (hangs, None, Ending.TRUNCATED, "agent_timeouts"),
        (answers_nothing, None, Ending.COMPLETED, None),
    ],
)
async def test_what_the_model_may_have_caused_is_scored_and_all_else_has_failed(
    agent, failure, ending, count
):
    episode, _ = await episode_of(agent, says("5"), timeout_s=0.5)
    found = episode.failure and (episode.failure.stage, episode.failure.kind)
    assert (found, episode.ending) == (failure, ending)
    assert {name for name in episode.counts if name.startswith("agent_")} == ({count} if count else set())
    if failure is None:
        assert episode.rewards_of() == (0.0,)


async def test_where_the_engine_fails_the_episode_has_failed_at_once():
    async def waits(url, key, task):
        reply = await ask(url, key)
        statuses.append(reply.status_code)
        await asyncio.sleep(60)

    statuses = []
    episode, _ = await episode_of(waits, RuntimeError("a card is gone"))
    assert (episode.failure.stage, episode.failure.kind) == ("act", "error")
    assert "a card is gone" in episode.failure.detail
    assert statuses in ([], [500])


async def test_an_episode_has_so_many_replies_and_tokens():
    refused = []

    async def goes_on(url, key, task):
        refused.extend([await ask(url, key) for _ in range(4)])
        refused.append(await ask(url, key, "word " * 3000))
        return "5"

    episode, _ = await episode_of(goes_on, says("4"), limits={"max_turns": 3, "max_tokens": 500})
    assert [reply.status_code for reply in refused] == [200, 200, 200, 400, 400]
    assert "3 replies" in refused[3].json()["error"]["message"]
    assert (episode.ending, episode.total_of()) == (Ending.TRUNCATED, 1.0)
    episode, _ = await episode_of(goes_on, says("4"), limits={"max_turns": 9, "max_tokens": 500})
    assert refused[-1].json()["error"]["code"] == "context_length_exceeded"
    assert episode.ending is Ending.TRUNCATED


async def test_a_first_prompt_that_is_too_long_is_a_turn_without_a_token():
    async def asks(url, key, task):
        assert (await ask(url, key, "word " * 3000)).status_code == 400

    episode, policy = await episode_of(asks, says("4"), limits={"max_tokens": 100})
    assert (episode.ending, policy.asked) == (Ending.TRUNCATED, [])
    (turn,) = episode.turns
    assert (len(turn.tokens.world_ids), len(turn.tokens.completion.token_ids)) == (100, 0)


async def test_a_key_opens_its_own_episode_and_ends_with_it():
    doors, statuses = [], {}
    both = asyncio.Event()

    async def asks(url, key, task):
        doors.append((url, key))
        if len(doors) == 2:
            (a, a_key), (_, b_key) = doors
            elsewhere = a.replace("e-1", "e-2")
            tries = {"own": (a, a_key), "other": (a, b_key), "none": (a, "x"), "unknown": (elsewhere, a_key)}
            for name, (address, given) in tries.items():
                statuses[name] = await ask(address, given)
            statuses["header"] = await post(a, CHAT, "x", {}, **{"authorization": "no", "x-api-key": a_key})
            both.set()
        await both.wait()
        await ask(url, key)
        return "5"

    await asyncio.gather(episode_of(asks, says("5")), episode_of(asks, says("5")))
    codes = {name: reply.status_code for name, reply in statuses.items()}
    assert codes == {"own": 200, "other": 401, "none": 401, "unknown": 401, "header": 400}
    # Whoever has no key does not learn which episodes there are.
    assert statuses["other"].text == statuses["unknown"].text
    assert (await ask(*doors[0])).status_code == 401


async def test_requests_that_an_agent_leaves_end_with_it():
    never = asyncio.Event()

    class Slow:
        version = 0
        started = ended = 0

        async def generate(self, prompt_ids, sampling, *, session):
            Slow.started += 1
            try:
                await never.wait()
            finally:
                Slow.ended += 1

        async def close_session(self, session):
            pass

    async def leaves_it(url, key, task):
        left = asyncio.create_task(ask(url, key))
        while not Slow.started:
            await asyncio.sleep(0.001)
        pending.append(left)
        return "5"

    from agentrl.rollout.agent import SamplingSettings, TokenAgent
    from tests.envs.gateway.worlds import WORDS, Asking

    pending = []
    agent = TokenAgent(Slow(), WORDS, SamplingSettings(), WORDS.bounded)
    episode = await play(Asking(leaves_it), agent, ASK)
    assert (Slow.started, Slow.ended) == (1, 1)
    # Nothing was sampled: its prompt is all there is.
    assert episode.rewards_of() == (1.0,)
    assert (await pending[0]).status_code == 503


async def test_parallel_and_rewritten_histories_are_trajectories_of_their_own():
    async def asks(url, key, task):
        first, second = await asyncio.gather(ask(url, key, "Left?"), ask(url, key, "Right?"))
        words = [reply.json()["choices"][0]["message"]["content"] for reply in (first, second)]
        messages = [
            {"role": "user", "content": "Left?"},
            {"role": "assistant", "content": f" {words[0]} \n"},
            {"role": "user", "content": "Sure?"},
        ]
        await post(url, CHAT, key, {"model": "m", "messages": messages})
        messages[1]["content"] = "Another word."
        await post(url, CHAT, key, {"model": "m", "messages": messages})
        return "5"

    episode, policy = await episode_of(asks, says("one"), says("two"), says("5"))
    assert [t.reason for t in episode.trajectories] == [None, Restart.SUB_AGENT, Restart.PARALLEL]
    assert [len(t.turns) for t in episode.trajectories] == [2, 1, 1]
    assert episode.counts["changed_white_space"] == 1
    trained = [sample.token_ids[sample.loss_mask].tolist() for sample in samples_of(episode)]
    sampled = sorted(token for _, ids in policy.asked for token in ids)
    assert sorted(token for ids in trained for token in ids) == sampled
    assert [reward for reward in episode.rewards_of() if reward is not None] == [1.0]


async def test_agents_without_tokens_take_turns():
    from tests.envs.gateway.worlds import Asking

    def script(task):
        result = yield says("", adds(2, 3))
        assert result == "5"
        yield says(result)

    episode = await play(Asking(calculator), ScriptedAgent(script(ASK)), ASK)
    assert (episode.failure, episode.ending) == (None, Ending.COMPLETED)
    assert episode.total_of() == 1.0
    assert [turn.observation[-1].text for turn in episode.turns] == ["How many are 2 and 3?", "5"]


async def test_a_custom_generate_function_is_refused():
    from agentrl import UserError
    from agentrl.envs.generate import generating
    from tests.envs.gateway.worlds import Asking

    with pytest.raises(UserError, match="plays its episodes by itself"):
        await generating(answers_nothing)(Asking(calculator), ScriptedAgent(iter(())), ASK)


def test_stage_errors_have_the_words_of_the_stage():
    assert str(StageError("program", "invalid", "x")).startswith("program invalid")
