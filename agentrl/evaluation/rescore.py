"""Other rewards for the episodes of a journal: nothing is sampled, and the verdicts in the journal stay.

rescored/brevity-5d1f03c2/
  rescoring.json              the rewards, a hash of their code, means before and after
  step_000012.jsonl.gz        the new verdicts of that file of the journal, one a line
"""

from __future__ import annotations

import asyncio
import hashlib
import inspect
import json
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from fnmatch import fnmatchcase
from itertools import groupby
from pathlib import Path
from statistics import fmean
from typing import Literal, NamedTuple, cast

from agentrl.assembly.functions import function_at
from agentrl.assembly.rewards import reward_function
from agentrl.envs import GroupReward, PlayEpisode, Reward, Scorer, play
from agentrl.envs.multi_agent import AnyEnv
from agentrl.envs.replay import play_again
from agentrl.envs.scoring import UNUSABLE, AnswerReward, Marked, failed, graded
from agentrl.errors import ConfigError, StageError
from agentrl.records import Entry, lines, members, read_journal
from agentrl.records.history import JOURNAL, locked
from agentrl.records.journal import SUFFIX
from agentrl.runtime.files import disk_errors, write_text
from agentrl.runtime.ownership import check_own
from agentrl.tools.names import Names
from agentrl.types import JSON, Ending, Episode, Verdict

StepRewards = Literal["keep", "drop", "again"]
"""The step rewards of the environment: as recorded, left out, or of the recorded actions played again."""

FOLDER = "rescored"
_AT_ONCE = 64
_ROUNDING = 1e-9
_NAMES = Names("reward", "package.module:name", ConfigError)


class NewRewards(NamedTuple):
    """Rewards, and what identifies them: their names, and a hash of the source files of their functions."""

    rewards: tuple[Reward | GroupReward, ...]
    steps: StepRewards
    label: str

    @classmethod
    def of(cls, names: Sequence[str], steps: StepRewards) -> NewRewards:
        """The rewards with these names.

        A name is that of a built-in reward of an answer, or the path of: a `Reward` or `GroupReward`, a
        function of an episode, or a function of a task and an answer.

        Raises:
            ConfigError: there is no such reward, or two have one name.
        """
        functions = [_reward(name) for name in names]
        rewards = tuple(reward for reward, _ in functions)
        digest = hashlib.blake2b(steps.encode(), digest_size=4)
        for name, (reward, function) in zip(names, functions, strict=True):
            digest.update(f"{name} {reward.weight} ".encode() + _source(function))
        Scorer(rewards)
        return cls(rewards, steps, f"{'+'.join(reward.name for reward in rewards)}-{digest.hexdigest()}")


class ScoreChange(NamedTuple):
    """A rollout whose score differs. file: of the journal."""

    file: str
    episode: str
    agent: str
    old: float
    new: float


@dataclass(frozen=True, slots=True)
class RescoredFile:
    """The rollouts of one file of the journal that have a score now.

    old, new: of those that had one before. first: the new scores of the others. failed: episodes that the new
    rewards cannot score, one reason for each.
    """

    file: str
    old: tuple[float, ...]
    new: tuple[float, ...]
    first: tuple[float, ...]
    changes: tuple[ScoreChange, ...]
    failed: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Rescoring:
    """The result. folder: of the new verdicts."""

    folder: Path
    label: str
    files: tuple[RescoredFile, ...]

    @property
    def groups(self) -> dict[str, list[RescoredFile]]:
        """All training steps together, and each evaluation."""
        named = groupby(self.files, key=lambda one: "training" if one.file.startswith("step_") else one.file)
        return {name: list(files) for name, files in named}

    def largest(self, n: int) -> list[ScoreChange]:
        """The n largest changes, the largest first."""
        changes = (change for file in self.files for change in file.changes)
        return sorted(changes, key=lambda change: -abs(change.new - change.old))[:n]

    def as_json(self, n: int) -> dict[str, JSON]:
        """Plain values, with the n largest changes."""
        rows: list[JSON] = [dict(row) for row in self.rows()]
        changes: list[JSON] = [change._asdict() for change in self.largest(n)]
        return {"folder": str(self.folder), "reward": self.label, "rows": rows, "largest": changes}

    def rows(self) -> Iterator[Mapping[str, JSON]]:
        """Counts and means of each group of files, and of all; first scores have rows of their own."""
        groups = self.groups
        for name, files in [*groups.items(), *([("all", list(self.files))] if len(groups) > 1 else [])]:
            old = [score for file in files for score in file.old]
            new = [score for file in files for score in file.new]
            first = [score for file in files for score in file.first]
            changed = sum(len(file.changes) for file in files)
            failed = sum(len(file.failed) for file in files)
            if old or failed or not first:
                yield _row(name, old, new, changed=changed, failed=failed)
            if first:
                yield _row(f"{name}, not scored before", [], first)


def _row(
    name: str, old: Sequence[float], new: Sequence[float], *, changed: int = 0, failed: int = 0
) -> Mapping[str, JSON]:
    return {
        "episodes of": name,
        "rollouts": len(new),
        "old_mean": fmean(old) if old else None,
        "new_mean": fmean(new) if new else None,
        "changed": changed,
        "failed": failed,
    }


@dataclass(frozen=True, slots=True)
class Rescorer:
    """Scores the journal in a folder. make_env, play_episode: for step rewards that are computed again."""

    folder: Path
    rewards: NewRewards
    make_env: Callable[[], AnyEnv] | None = None
    play_episode: PlayEpisode = play

    async def run(self, pattern: str, progress: Callable[[int], None] = lambda _: None) -> Rescoring:
        """Score the files whose names fit the pattern, and write the new verdicts.

        Raises:
            ConfigError: there are none, one is broken, or every episode fails; or see `check_own`.
            RunBusyError: another process writes the same verdicts.
            DiskError: the disk does not take the verdicts.
        """
        paths = files_of(self.folder, pattern)
        target = self.folder / FOLDER / self.rewards.label
        check_own(self.folder)
        with locked(target):
            try:
                with disk_errors(target, "make room there, or make it writable"):
                    return await self._files(paths, target, progress)
            except (OSError, ValueError) as error:
                raise ConfigError(
                    f"{self.folder} cannot be scored again ({error}); restore its journal."
                ) from None

    async def _files(self, paths: Sequence[Path], target: Path, progress: Callable[[int], None]) -> Rescoring:
        files = [await self._file(path, target, progress) for path in paths]
        rescoring = Rescoring(target, self.rewards.label, tuple(files))
        failed = [reason for file in files for reason in file.failed]
        if failed and not any(file.new or file.first for file in files):
            raise ConfigError(f"no episode can be scored (first: {failed[0]}); mend the reward.")
        text = json.dumps({**rescoring.as_json(100), "step_rewards": self.rewards.steps}, indent=1)
        write_text(target / "rescoring.json", f"{text}\n")
        return rescoring

    async def _file(self, path: Path, target: Path, progress: Callable[[int], None]) -> RescoredFile:
        entries = list(read_journal(path))
        slots = asyncio.Semaphore(_AT_ONCE)

        async def mark(entry: Entry) -> Marked:
            async with slots:
                marked = await self._mark(entry.episode)
            progress(1)
            return marked

        marked = await asyncio.gather(*map(mark, entries))
        scorer = Scorer(self.rewards.rewards, self.rewards.label)
        scored = await scorer.judge_all(marked)
        members.append(
            target / path.name, (lines.to_line(asdict(verdict)) for verdict in scored.verdicts), at=0
        )
        old = {v.rollout_id: v.total for entry in entries for v in _of_policy(entry)}
        new = {v.rollout_id: v.total for v in scored.verdicts}
        both = [id for id in old if id in new]
        return RescoredFile(
            path.name,
            tuple(old[id] for id in both),
            tuple(new[id] for id in both),
            tuple(score for id, score in new.items() if id not in old),
            tuple(
                ScoreChange(path.name, *id, old[id], new[id])
                for id in both
                if abs(old[id] - new[id]) > _ROUNDING
            ),
            tuple(
                f"{after.id}: {after.failure.detail}"
                for before, after in zip(entries, scored.episodes, strict=True)
                if after.failure is not None and before.episode.failure is None
            ),
        )

    async def _mark(self, episode: Episode) -> Marked:
        """The results of the rewards, which read the recorded episode; and its step rewards as chosen."""
        scorer = Scorer(self.rewards.rewards)
        marked = await scorer.mark(episode)
        if not marked.is_usable or self.rewards.steps == "keep":
            return marked
        if self.rewards.steps == "drop":
            nothing = tuple(None for _ in episode.step_rewards)
            return Marked(replace(marked.episode, step_rewards=nothing), marked.parts)
        assert self.make_env is not None, "step rewards are computed again in an environment"
        again = await play_again(self.make_env(), episode, self.play_episode)
        if again.ending in UNUSABLE:
            failure = again.failure
            detail = "the recorded actions do not end the episode" if failure is None else failure.detail
            return Marked(failed(episode, StageError("step", "replay", detail)), {})
        return Marked(replace(marked.episode, step_rewards=again.step_rewards), marked.parts)


def files_of(folder: Path, pattern: str) -> list[Path]:
    """The files of a journal whose names fit a pattern.

    Raises:
        ConfigError: there are none.
    """
    paths = sorted((folder / JOURNAL).glob(f"*{SUFFIX}"))
    fitting = [path for path in paths if fnmatchcase(path.name.removesuffix(SUFFIX), pattern)]
    if not fitting:
        names = ", ".join(path.name.removesuffix(SUFFIX) for path in paths) or "none"
        raise ConfigError(f"{folder} has no episodes in files `{pattern}`; its files are {names}.")
    return fitting


def _of_policy(entry: Entry) -> list[Verdict]:
    return [verdict for verdict in entry.verdicts if verdict.agent in entry.episode.trained_agents]


def _reward(name: str) -> tuple[Reward | GroupReward, object]:
    """The reward with a name, and the function that it calls."""
    if ":" not in name:
        function = reward_function(name)
        return _of_answer(name, function), function
    imported = _NAMES.imported(name)
    if isinstance(imported, Reward | GroupReward):
        return imported, imported.function
    function_of_user = function_at("reward", name)
    match _num_arguments(function_of_user):
        case 1:
            return Reward(cast("Callable[[Episode], float]", function_of_user)), function_of_user
        case 2:
            return _of_answer(name.rpartition(":")[2], cast(AnswerReward, function_of_user)), function_of_user
    raise ConfigError(f"{name} takes neither an episode, nor a task and an answer; mend its parameters.")


def _num_arguments(function: object) -> int:
    """How many arguments a function needs."""
    parameters = inspect.signature(cast("Callable[..., object]", function)).parameters.values()
    by_position = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(p.kind in by_position and p.default is inspect.Parameter.empty for p in parameters)


def _of_answer(name: str, function: AnswerReward) -> Reward:
    """A reward of an answer as one of an episode: the answer is the last message of each agent.

    An episode that a limit cut off has no answer, and 0.
    """

    async def measure(episode: Episode) -> Mapping[str, float]:
        agents = episode.trained_agents
        if episode.ending is not Ending.COMPLETED:
            return dict.fromkeys(agents, 0.0)
        limit = episode.limits.reward_timeout_s
        return {
            agent: await graded(function, episode.task, _answer(episode, agent), limit) for agent in agents
        }

    return Reward(cast("Callable[[Episode], Awaitable[Mapping[str, float]]]", measure), name=name)


def _answer(episode: Episode, agent: str) -> str:
    turns = episode.turns_of(agent)
    action = turns[-1].action if turns else None
    return "" if action is None else "".join([action.text, *(call.raw for call in action.tool_calls)])


def _source(function: object) -> bytes:
    """The text of the file of a function; of one without a file, its name."""
    try:
        file = inspect.getsourcefile(inspect.unwrap(cast("Callable[..., object]", function)))
        return Path(file or "").read_bytes()
    except (TypeError, OSError):
        return repr(getattr(function, "__qualname__", type(function).__qualname__)).encode()
