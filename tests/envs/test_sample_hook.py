"""A sample hook sees an episode that has ended, and changes what it may."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from agentrl import say
from agentrl.envs import play
from agentrl.envs.contract import check_sample_hook
from agentrl.envs.sample_hook import changed, hooked
from agentrl.types import Ending, RewardParts
from tests.worlds import Parrot, Speaker, turn_tokens

EPISODE = asyncio.run(
    play(Parrot(), Speaker(say("yes"), tokens=[turn_tokens(2, 3)]), Parrot().tasks("train")[0])
)


def test_counts_rewards_and_endings_change():
    other = replace(
        EPISODE, counts={"seen": 2}, step_rewards=(RewardParts({"a": 0.5}),), ending=Ending.TRUNCATED
    )
    assert changed(EPISODE, other) is other
    assert changed(EPISODE, None) is EPISODE


@pytest.mark.parametrize(
    ("returned", "sentence"),
    [
        (1.0, "returns an Episode or None, not 1.0"),
        (replace(EPISODE, id="other"), "changes counts, step_rewards, ending of an episode, not its id"),
        (replace(EPISODE, trajectories=()), "not its trajectories"),
        (replace(EPISODE, ending=Ending.ABORTED), "is completed or truncated, not aborted"),
        (replace(EPISODE, step_rewards=()), "has 1 steps, and a reward for each"),
        (replace(EPISODE, step_rewards=(float("nan"),)), "is nan, not a finite number"),
        (replace(EPISODE, step_rewards=(None,)), "None in place of a reward"),
        (replace(EPISODE, step_rewards=({"agent": 1.0},)), "that of one a number"),
    ],
)
def test_whatever_was_played_stays(returned, sentence):
    with pytest.raises(ValueError, match=sentence):
        changed(EPISODE, returned)


async def episode_by(hook):
    return await hooked(play, hook)(
        Parrot(), Speaker(say("yes"), tokens=[turn_tokens(2, 3)]), Parrot().tasks("train")[0]
    )


async def test_one_that_waits_is_awaited_and_one_that_fails_fails_the_episode():
    async def waits(episode):
        await asyncio.sleep(0)
        return replace(episode, counts={"seen": 1})

    assert (await episode_by(waits)).counts == {"seen": 1}
    failed = await episode_by(lambda episode: 1 / 0)
    assert (failed.ending, failed.failure.stage, failed.failure.kind) == ("failed", "sample_hook", "error")
    assert "ZeroDivisionError" in failed.failure.detail


async def test_it_does_not_see_an_episode_that_failed():
    class Broken(Parrot):
        async def reset(self, task, *, seed):
            raise ConnectionError("no world")

    seen = []
    episode = await hooked(play, seen.append)(
        Broken(), Speaker(say("yes"), tokens=[turn_tokens(2, 3)]), Parrot().tasks("train")[0]
    )
    assert (episode.failure.stage, seen) == ("reset", [])


async def test_the_contract_is_checked_before_a_run():
    await check_sample_hook(lambda episode: None)
    with pytest.raises(ValueError, match=r"it failed on an episode of the task `quiz` .*KeyError"):
        await check_sample_hook(lambda episode: {}["x"])
