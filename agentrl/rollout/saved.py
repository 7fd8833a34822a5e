"""Groups that a run was playing when it ended, in the lines of a file from which it goes on.

    {"ordinal": 12, "outcome": {...}}    a group that had ended (`GroupOutcome`)
    {"ordinal": 13, "group": {...}}      one that was stopped (`GroupInProgress`)
    {"ordinal": 14, "step": {...}}       what an episode has played since its line before (`StepLine`)

A run that is stopped writes the first two, and one that plays the third, after each turn (`group_log`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import TypeVar

from pydantic import TypeAdapter
from pydantic_core import PydanticSerializationError

from agentrl.data import Prompt
from agentrl.envs.resuming import EpisodeInProgress, SavedTurns
from agentrl.envs.scoring import Marked
from agentrl.records import lines
from agentrl.rollout.group import GroupInProgress, GroupOutcome, GroupStep
from agentrl.runtime.files import write_bytes
from agentrl.types import StepReward, Task

T = TypeVar("T")


@dataclass(frozen=True, slots=True, eq=False)
class StepLine:
    """A `GroupStep`. version: the policy's when the group started. before: steps before (count).

    turns, rewards: those of an episode that goes on, since the line before. state: all else of it; None =
    a later line has it. ended: the episode at its end, without the turns of the lines before.
    """

    sibling: int
    attempt: int
    version: int
    before: int
    turns: tuple[SavedTurns, ...] = ()
    rewards: tuple[StepReward, ...] = ()
    state: EpisodeInProgress | None = None
    ended: Marked | None = None

    @classmethod
    def of(cls, step: GroupStep) -> StepLine:
        """The line of a step. Its task is that of the prompt, and left out."""
        head = (step.sibling, step.attempt, step.start_version, step.num_before)
        if isinstance(step.part, Marked):
            episode = replace(step.part.episode, task=_without_content(step.part.episode.task))
            return cls(*head, ended=replace(step.part, episode=episode))
        played = step.part.played
        assert played is not None, "only an episode whose state was saved is passed on"
        state = replace(
            step.part,
            task=_without_content(step.part.task),
            played=replace(played, trajectories=(), step_rewards=()),
        )
        return cls(*head, played.trajectories, played.step_rewards, state)

    @property
    def newest(self) -> int:
        """The newest version that the line depends on."""
        ended = () if self.ended is None else self.ended.episode.trajectories
        parts = [*(new.turns for new in self.turns), *(each.turns for each in ended)]
        tokens = (turn.tokens for turns in parts for turn in turns if turn.tokens is not None)
        versions = (each.completion.versions for each in tokens)
        return max([self.version, *(int(each.max()) for each in versions if len(each))])


@dataclass(frozen=True, slots=True, eq=False)
class Line:
    """A line of the file: one of the three kinds."""

    ordinal: int
    outcome: GroupOutcome | None = None
    group: GroupInProgress | None = None
    step: StepLine | None = None


@dataclass(frozen=True, slots=True, eq=False)
class SavedGroups:
    """Groups that no finished step was trained on, by the ordinal of their prompt.

    ended, in_progress: groups with an outcome, and those that go on.
    """

    ended: dict[int, GroupOutcome] = field(default_factory=dict)
    in_progress: dict[int, GroupInProgress] = field(default_factory=dict)

    @classmethod
    def of(cls, ended: Iterable[GroupOutcome], in_progress: Mapping[int, GroupInProgress]) -> SavedGroups:
        """The groups of a run that stops."""
        return cls({outcome.ordinal: outcome for outcome in ended}, dict(in_progress))

    def take(self, prompt: Prompt) -> tuple[GroupOutcome | None, GroupInProgress | None]:
        """The group of a prompt: its outcome, or as far as it was played; None, None = there is none."""
        begun = self.in_progress.pop(prompt.index, None)
        if begun is not None:
            attempts = tuple(tuple(_of_task(each, prompt.task) for each in own) for own in begun.attempts)
            begun = replace(begun, attempts=attempts)
        return self.ended.pop(prompt.index, None), begun

    def write(self, path: Path) -> None:
        """Write them, whole or not at all; where there are none, no file is left.

        Raises:
            OSError: the disk does not take it.
        """
        rows = [Line(ordinal, outcome=outcome) for ordinal, outcome in self.ended.items()]
        rows += [Line(ordinal, group=group) for ordinal, group in self.in_progress.items()]
        if rows:
            write_bytes(path, b"".join(map(to_line, rows)))
        else:
            path.unlink(missing_ok=True)


def read_lines(
    path: Path, *, version: int, on_event: Callable[[str], None]
) -> tuple[list[Line], SavedGroups]:
    """The lines of a file that can be used where the weights are of a version, and the groups in them.

    An episode goes on from its last turn that is complete and of no newer version: newer weights are those
    of steps that were not kept. on_event: called with a sentence where the file is damaged; it is then empty.
    """
    used: list[Line] = []
    groups: dict[int, _Group] = {}
    saved = SavedGroups()
    try:
        for row in lines.read(path) if path.exists() else ():
            line = _adapter().validate_python(row)
            if line.outcome is not None:
                saved.ended[line.ordinal] = line.outcome
                used.append(line)
            elif groups.setdefault(line.ordinal, _Group()).add(line, version):
                used.append(line)
    except (OSError, ValueError, TypeError, RecursionError):
        on_event(f"Warning: {path} is damaged: what was in flight is played again.")
        return [], SavedGroups()
    played = {ordinal: group.in_progress() for ordinal, group in groups.items() if group.siblings}
    saved.in_progress.update(played)
    return used, saved


def to_line(line: Line) -> bytes:
    """A line of the file."""
    return _json(_adapter(), line) + b"\n"


@dataclass(slots=True)
class _Sibling:
    """An episode of a group, as its lines follow each other. state: None = it has none yet."""

    attempts: list[Marked] = field(default_factory=list)
    turns: list[SavedTurns] = field(default_factory=list)
    rewards: list[StepReward] = field(default_factory=list)
    state: EpisodeInProgress | None = None

    @classmethod
    def of(cls, attempts: Sequence[Marked], stopped: EpisodeInProgress | None) -> _Sibling:
        """An episode that was stopped."""
        played = None if stopped is None else stopped.played
        if played is None:
            return cls(list(attempts), state=stopped)
        return cls(list(attempts), list(played.trajectories), list(played.step_rewards), stopped)

    def add(self, step: StepLine) -> bool:
        """Add a line, if it continues what is here: it may be of an episode that was played again."""
        if step.before == 0 and step.attempt <= len(self.attempts):
            del self.attempts[step.attempt :]
            self._begin()
        elif step.attempt != len(self.attempts) or step.before != len(self.rewards):
            return False
        if step.ended is not None:
            self.attempts.append(self._whole(step.ended))
            self._begin()
            return True
        for index, new in enumerate(step.turns):
            if index < len(self.turns):
                before = self.turns[index]
                self.turns[index] = before._replace(turns=before.turns + new.turns)
            else:
                self.turns.append(new)
        self.rewards += step.rewards
        self.state = step.state
        return True

    def stopped(self) -> EpisodeInProgress | None:
        """The episode, as far as it can go on; None = it begins."""
        if self.state is None or self.state.played is None:
            return self.state
        played = replace(self.state.played, trajectories=tuple(self.turns), step_rewards=tuple(self.rewards))
        return replace(self.state, played=played)

    def _begin(self) -> None:
        self.turns, self.rewards, self.state = [], [], None

    def _whole(self, ended: Marked) -> Marked:
        trajectories = tuple(
            replace(each, turns=self.turns[index].turns + each.turns) if index < len(self.turns) else each
            for index, each in enumerate(ended.episode.trajectories)
        )
        return replace(ended, episode=replace(ended.episode, trajectories=trajectories))


@dataclass(slots=True)
class _Group:
    """A group, as its lines follow each other."""

    version: int = 0
    siblings: dict[int, _Sibling] = field(default_factory=dict)

    def add(self, line: Line, version: int) -> bool:
        """Add a line, if it can be used at this version of the weights."""
        if (group := line.group) is not None:
            pairs = zip(group.attempts, group.stopped, strict=True)
            self.siblings = {k: _Sibling.of(*pair) for k, pair in enumerate(pairs)}
            self.version = group.start_version
            return True
        step = line.step
        if step is None or step.newest > version:
            return False
        self.version = step.version
        return self.siblings.setdefault(step.sibling, _Sibling()).add(step)

    def in_progress(self) -> GroupInProgress:
        siblings = [self.siblings.get(k, _Sibling()) for k in range(max(self.siblings) + 1)]
        return GroupInProgress(
            self.version,
            tuple(tuple(sibling.attempts) for sibling in siblings),
            tuple(sibling.stopped() for sibling in siblings),
        )


def _json(adapter: TypeAdapter[T], value: T) -> bytes:
    """A value as JSON: in one call, which takes a third of the time of the journal's way."""
    # What is no JSON, such as half of a surrogate pair, takes that one.
    with suppress(PydanticSerializationError, UnicodeEncodeError):
        return adapter.dump_json(value, exclude_defaults=True, warnings="none", fallback=str)
    row = adapter.dump_python(value, exclude_defaults=True, warnings="none")
    return lines.to_line(row).rstrip(b"\n")


def _without_content(task: Task) -> Task:
    return Task(task.id, ())


def _of_task(marked: Marked, task: Task) -> Marked:
    return replace(marked, episode=replace(marked.episode, task=task))


@lru_cache(maxsize=1)
def _adapter() -> TypeAdapter[Line]:
    return TypeAdapter(Line)


@lru_cache(maxsize=1)
def _states() -> TypeAdapter[EpisodeInProgress | None]:
    return TypeAdapter(EpisodeInProgress | None)


def head_and_state(line: Line) -> tuple[bytes, bytes]:
    """The JSON of a line of a step without its state, and that of the state (`null` = it has none).

    HEAD,"state":STATE}} is the line.
    """
    assert line.step is not None, "other lines have no state"
    state = None if line.step.state is None else line.step.state
    rest = replace(line, step=replace(line.step, state=None))
    return to_line(rest).rstrip(b"\n")[:-2], _json(_states(), state)
