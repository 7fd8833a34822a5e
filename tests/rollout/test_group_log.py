"""Groups of a run that is killed go on from their last turns: token for token those of a run that was not."""

from __future__ import annotations

import asyncio
import errno
import os
import random
from itertools import takewhile

import numpy as np
import pytest

from agentrl import Limits, Message, Step
from agentrl.data import Prompt
from agentrl.engine.embedded import EmbeddedEngine
from agentrl.envs import Scorer
from agentrl.envs.resuming import StoppableEpisodes
from agentrl.rollout.agent import TokenAgent
from agentrl.rollout.group import GroupPlayer
from agentrl.rollout.group_log import GroupLog
from agentrl.rollout.saved import read_lines
from agentrl.types import Restart
from tests.envs.test_resuming import TASK, Duet, Forgetting, Letters, Rare, logprobs_of, record_of
from tests.laws.test_on_policy import model_of
from tests.rollout.test_saved import GROUPS, SETTINGS, SIZE, Counted, Playing, records_of


def at_once(work):
    """A thread that is never late."""
    work()


class Compacting(Counted):
    """Tells the story anew after every second turn."""

    id = "Compacting-v0"
    limits = Limits(max_turns=6, max_tokens=150)

    async def step(self, action):
        step = await super().step(action)
        if step.terminated or len(self.drawn) % 2:
            return step
        return Step.restarted(Message("user", "".join(map(str, self.drawn))), reason=Restart.COMPACTED)


class Harmony(Duet):
    """Counts, as `Counted` does."""

    async def step(self, actions):
        Counted.num_steps += 1
        return await super().step(actions)


def logged(path, env_class, version=0):
    """Groups that go on with what is in the file, and whose turns are added to it."""
    log = GroupLog(at_once, pytest.fail)
    return Playing(env_class, saved=log.resume(path, version), note=log.add)


async def killed_after(number, playing, path, rng):
    """The first batch, or None where it was killed after so many iterations of the event loop.

    What is on the disk at that moment is all that is left; in half of the cases a line is torn.
    """
    taking = asyncio.create_task(playing.batch())
    for _ in range(number):
        await asyncio.sleep(0)
    if taking.done():
        return taking.result()
    data = path.read_bytes()
    taking.cancel()
    await asyncio.wait([taking])
    await playing.producer.close()
    path.write_bytes(data[: len(data) - rng.randrange(40) * rng.randrange(2)])
    return None


@pytest.mark.parametrize(
    ("env_class", "longest"),
    [
        (Counted, 70),
        pytest.param(Compacting, 140, marks=pytest.mark.full),
        pytest.param(Harmony, 100, marks=pytest.mark.full),
    ],
)
async def test_a_batch_with_kills_at_random_moments_is_the_one_without(tmp_path, env_class, longest):
    Counted.num_steps = 0
    expected = await Playing(env_class).batch()
    num_steps, Counted.num_steps = Counted.num_steps, 0
    rng, path, kills, outcomes = random.Random(env_class.__name__), tmp_path / "groups.jsonl", 0, None
    while outcomes is None:
        assert kills < 60, "it begins again each time"
        number = rng.randrange(longest // 2, longest)
        outcomes = await killed_after(number, logged(path, env_class), path, rng)
        kills += outcomes is None
    assert kills > 1
    # Each kill costs at most the turn that was under way, and one whose line was torn, of an episode.
    assert Counted.num_steps - num_steps <= (kills + 1) * (GROUPS * SIZE + 1)
    # A group that is dropped is in the batch that is taken after its end.
    kept, whole = ([each for each in batch if each.kept] for batch in (outcomes, expected))
    assert records_of(kept) == records_of(whole)
    for one, other in zip(kept, whole, strict=True):
        for episode, without in zip(one.episodes, other.episodes, strict=True):
            assert np.allclose(logprobs_of(episode), logprobs_of(without), rtol=0, atol=1e-4)
            assert (episode.counts, episode.seed) == (without.counts, without.seed)
            assert episode.task == without.task
        assert [v.total for v in one.group.verdicts] == [v.total for v in other.group.verdicts]


class Group:
    """One group of two episodes, whose weights have another version after every fourth turn of the engine."""

    def __init__(self, note):
        self.engine = EmbeddedEngine.from_model(model_of("qwen3"), max_slots=4)
        self.num_turns, self.note = 0, note
        self.player = GroupPlayer(
            Letters,
            lambda: TokenAgent(self, Rare(), SETTINGS),
            Scorer(),
            SIZE,
            retries=0,
            seed=0,
            episodes=StoppableEpisodes(),
            note=note,
        )

    async def generate(self, prompt_ids, sampling, *, session):
        self.num_turns += 1
        if self.num_turns % 4 == 0:
            self.engine.memory.rename(self.num_turns // 4)
        return await self.engine.generate(prompt_ids, sampling, session=session)

    async def close_session(self, session):
        await self.engine.close_session(session)


def versions_of(episode):
    """The newest version of each turn."""
    return [
        max(turn.tokens.completion.versions.tolist(), default=0)
        for t in episode.trajectories
        for turn in t.turns
    ]


async def test_a_run_goes_on_with_turns_of_no_newer_version_than_its_weights(tmp_path):
    """The oracle is the complete group: its turns up to the first that has a newer version."""
    path, log = tmp_path / "groups.jsonl", GroupLog(at_once, pytest.fail)
    log.begin(path, 1000)
    group = Group(log.add)
    outcome = await group.player.play(Prompt(7, TASK, 3), 0)
    episodes = sorted(outcome.episodes, key=lambda episode: episode.id)
    newest = max(max(versions_of(episode)) for episode in episodes)
    assert newest >= 1
    for version in range(newest + 1):
        _, saved = read_lines(path, version=version, on_event=pytest.fail)
        begun = saved.in_progress[7]
        for k, episode in enumerate(episodes):
            versions = versions_of(episode)
            usable = [*takewhile(lambda v, limit=version: v <= limit, versions)]
            if len(usable) == len(versions):
                assert record_of(begun.attempts[k][0].episode) == record_of(episode), (
                    "an episode that ended is kept"
                )
                continue
            stopped = begun.stopped[k] if k < len(begun.stopped) else None
            turns = () if stopped is None else stopped.played.trajectories[0].turns
            assert [t.tokens.completion.token_ids.tolist() for t in turns] == [
                t.tokens.completion.token_ids.tolist() for t in episode.turns[: len(usable)]
            ]
    await group.engine.close()


async def test_a_checkpoint_begins_with_the_groups_in_flight_and_the_file_of_the_one_before_is_left(tmp_path):
    first, second, log = tmp_path / "first", tmp_path / "second", GroupLog(at_once, pytest.fail)
    log.begin(first, 0)
    notes = []
    group = Group(notes.append)
    for ordinal in (7, 8):
        await group.player.play(Prompt(ordinal, TASK, 3), 0)
    await group.engine.close()
    old = [note for note in notes if note.ordinal == 7]
    new = [note for note in notes if note.ordinal == 8]
    for note in (*old, *new[:2]):
        log.add(note)
    before = first.read_bytes()
    # 7 was trained; 9 is the next prompt.
    log.keep([8], 9)
    log.begin(second, 1000)
    for note in new[2:]:
        log.add(note)
    assert first.read_bytes() == before
    _, saved = read_lines(second, version=1000, on_event=pytest.fail)
    assert saved.in_progress.keys() == {8}
    assert all(len(attempts) == 1 for attempts in saved.in_progress[8].attempts)
    # A version that the checkpoint does not have is of no use to it.
    log.begin(third := tmp_path / "third", 0)
    size = third.stat().st_size
    for note in new:
        log.add(note._replace(start_version=1))
    assert third.stat().st_size == size


async def test_a_world_that_saves_no_state_is_kept_at_its_end_alone(tmp_path):
    notes = []
    playing = Playing(Forgetting, note=notes.append)
    await playing.batch()
    assert notes
    assert {note.num_before for note in notes} == {0}


async def test_what_is_kept_has_a_limit_and_a_full_disk_is_one_sentence(tmp_path, monkeypatch):
    notes, events, path = [], [], tmp_path / "groups.jsonl"
    await Playing(note=notes.append).batch()
    log = GroupLog(at_once, events.append, max_bytes=20_000)
    log.begin(path, 0)
    for note in notes:
        log.add(note)
    assert 0 < path.stat().st_size <= 20_000
    assert log._num_bytes <= 20_000
    _, saved = read_lines(path, version=0, on_event=pytest.fail)
    assert saved.in_progress

    def full(descriptor, data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    log = GroupLog(at_once, events.append)
    log.begin(path, 0)
    monkeypatch.setattr(os, "write", full)
    for note in notes:
        log.add(note)
    assert len(events) == 1
    assert events[0].startswith("Warning: groups in flight are not kept (No space left on device)")
