"""What SFT imitates, as Samples: conversations of files, and journalled episodes with their own tokens.

A conversation is rendered as an episode of the same messages is. An episode is not rendered: its tokens are
those that were sampled. Both are left out where they are longer than the context, and counted.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np

from agentrl.algorithms.samples import samples_of
from agentrl.assembly.config import SftConfig
from agentrl.assembly.sections import SftSection
from agentrl.assembly.token_texts import model_directories
from agentrl.data.conversations import Dialogue, Dialogues
from agentrl.data.files import SlicedPath
from agentrl.errors import ConfigError, DataError, RenderingError, UserError
from agentrl.records import Entry, read_journal
from agentrl.records.history import JOURNAL
from agentrl.records.journal import SUFFIX
from agentrl.run.demonstrations import Demonstrated, ReadsDifferentlyError, samples_of_turns
from agentrl.types import Ending, Message, RolloutId, Sample
from agentrl.types.seams import Renderer, ToolSchema
from agentrl.weights.hf.folders import holds_model
from agentrl.weights.hf.source import ModelSource, open_tokenizer

FAILED, TRUNCATED, UNSCORED, NO_TOKENS = "failed", "truncated", "not scored", "played without tokens"
READS_DIFFERENTLY = "read back differently in this format"
_JOURNALS = re.compile(r"(step|eval)_")
Unit = tuple[Sample, ...]
"""The Samples of one conversation, or of one agent's part of an episode."""


class Content(NamedTuple):
    """A unit, or the reason why it is left out. reward: of an episode."""

    unit: Unit
    reason: str = ""
    reward: float | None = None


@dataclass(slots=True)
class Imitated:
    """The conversations and episodes of a setting that are imitated.

    left_out: the number of the others, by reason. best: the highest reward of an episode.
    """

    units: list[Unit] = field(default_factory=list)
    left_out: Counter[str] = field(default_factory=Counter)
    best: float | None = None

    def add(self, content: Content, too_long: str) -> None:
        """Count what was read. too_long: why it does not fit the context; empty if it does."""
        if content.reward is not None:
            self.best = content.reward if self.best is None else max(self.best, content.reward)
        if reason := content.reason or too_long:
            self.left_out[reason] += 1
        else:
            self.units.append(content.unit)

    @property
    def samples(self) -> list[Sample]:
        """All Samples, in order."""
        return [sample for unit in self.units for sample in unit]

    @property
    def fingerprint(self) -> str:
        """A hash of all tokens and of the masks."""
        digest = hashlib.blake2b(digest_size=16)
        for sample in self.samples:
            digest.update(sample.token_ids.tobytes() + sample.loss_mask.tobytes() + b"|")
        return digest.hexdigest()

    def summary(self, setting: str) -> str:
        """One sentence: how many there are, and how many were left out, and why."""
        counts = ", ".join(f"{number:,} {reason}" for reason, number in sorted(self.left_out.items()))
        tokens = sum(int(sample.loss_mask.sum()) for sample in self.samples)
        taken = f"{setting}: {len(self.units):,} taken ({tokens:,} trained tokens)"
        return f"{taken}, {self.left_out.total():,} left out ({counts})." if counts else f"{taken}."


@dataclass(frozen=True, slots=True)
class SftReader:
    """Reads paths of sft_data.

    env_tools: of conversations without tools of their own. max_length: of a Sample (tokens); None = any.
    progress: called with the number of conversations and episodes that a call has read so far.
    """

    section: SftSection
    source: ModelSource
    renderer: Renderer
    env_tools: Sequence[ToolSchema]
    max_length: int | None
    progress: Callable[[int], None] = lambda _: None

    async def read(self, paths: Sequence[str], setting: str) -> Imitated:
        """Everything in some paths. setting: of the run, which names them, for error messages.

        Raises:
            UserError: a path cannot be read, a row is no conversation, the episodes are tokens of another
                tokenizer, or nothing is left.
        """
        imitated = Imitated()
        number = 0
        async for content in self._contents(paths):
            number += 1
            imitated.add(content, self._too_long(content.unit))
            self.progress(number)
            # Ctrl-C takes effect here.
            await asyncio.sleep(0)
        if not imitated.units:
            raise ConfigError(self._nothing_left(imitated, setting, ", ".join(paths)))
        return imitated

    async def _contents(self, paths: Sequence[str]) -> AsyncIterator[Content]:
        section = self.section
        for path in paths:
            if is_journal(path):
                for content in self._episodes(path):
                    yield content
            else:
                dialogues = Dialogues(path, messages_key=section.messages_key, tools_key=section.tools_key)
                for dialogue in dialogues:
                    yield await self._rendered(dialogue)

    async def _rendered(self, dialogue: Dialogue) -> Content:
        tools = self.env_tools if dialogue.tools is None else dialogue.tools
        turns = [Demonstrated(*turn[:2], tools, turn.is_trained) for turn in dialogue.turns]
        try:
            samples = await samples_of_turns(turns, self.renderer, RolloutId(dialogue.where), is_checked=True)
        except ReadsDifferentlyError:
            return Content((), READS_DIFFERENTLY)
        except (RenderingError, UserError, ValueError) as error:
            raise DataError(
                f"{dialogue.where} cannot be rendered: {str(error).removesuffix('.')}."
            ) from error
        return Content(tuple(samples))

    def _episodes(self, path: str) -> Iterator[Content]:
        name, start, stop = SlicedPath.of(path)
        self._check_tokenizer(Path(name))
        contents = [[*self._rollouts(entry)] for entry in _entries(Path(name))]
        for rollouts in contents[start:stop]:
            yield from rollouts

    def _rollouts(self, entry: Entry) -> Iterator[Content]:
        """The parts of an episode that the trained policy played."""
        episode, least = entry.episode, self.section.min_reward
        rewards = {verdict.agent: verdict.total for verdict in entry.verdicts}
        reason = _unusable(entry)
        samples = () if reason else samples_of(episode)
        for agent in episode.trained_agents:
            reward = rewards.get(agent)
            unit = tuple(_imitated(s) for s in samples if s.rollout_id.agent == agent and s.loss_mask.any())
            if reason or not unit:
                yield Content((), reason or FAILED)
            elif least is not None and (reward is None or reward < least):
                yield Content((), UNSCORED if reward is None else f"below min_reward = {least:g}", reward)
            else:
                yield Content(unit, reward=reward)

    def _check_tokenizer(self, path: Path) -> None:
        folder = path if path.is_dir() else path.parent.parent
        for directory in model_directories(folder):
            if not holds_model(directory):
                continue
            if open_tokenizer(directory).get_vocab() != self.source.tokenizer.get_vocab():
                raise ConfigError(
                    f"the episodes of {path} are tokens of another tokenizer than the model's; start from "
                    f"the model that played them: --hf-checkpoint {directory}."
                )
            return
        raise ConfigError(
            f"{folder} holds no checkpoint/ and names no model, whose tokenizer the episodes of {path} are "
            "tokens of; name the folder of a run that has ended."
        )

    def _too_long(self, unit: Unit) -> str:
        longest = max((len(sample) for sample in unit), default=0)
        is_long = self.max_length is not None and longest > self.max_length
        return f"longer than {self.max_length:,} tokens" if is_long else ""

    def _nothing_left(self, imitated: Imitated, setting: str, paths: str) -> str:
        counts = ", ".join(f"{number:,} {reason}" for reason, number in sorted(imitated.left_out.items()))
        if not counts:
            return f"{setting}: {paths} holds no episodes; check the path and the slice."
        below = [reason for reason in imitated.left_out if reason.startswith("below")]
        remedy = "raise rollout_max_context_len, or choose others"
        if READS_DIFFERENTLY in imitated.left_out:
            remedy = "choose another dialect or chat_format"
        if below:
            remedy = f"the highest reward is {imitated.best:g}: lower min_reward"
        return f"{setting}: nothing of {paths} can be imitated ({counts}); {remedy}."


def texts_of(section: SftSection, paths: Sequence[str], most: int) -> Iterator[str]:
    """The texts of the first conversations, for the tokenizer of a new model.

    Raises:
        DataError: a file cannot be read, or a row is no conversation.
    """
    for path in (path for path in paths if not is_journal(path)):
        dialogues = Dialogues(path, messages_key=section.messages_key, tools_key=section.tools_key)
        turns = (turn for dialogue in islice(dialogues, most) for turn in dialogue.turns)
        for message in (message for turn in turns for message in (*turn.observation, turn.action)):
            yield from _texts(message)


def _texts(message: Message) -> Iterator[str]:
    yield message.text
    yield message.reasoning or ""
    for value in (value for call in message.tool_calls for value in (call.arguments or {}).values()):
        yield value if isinstance(value, str) else json.dumps(value)


def is_journal(path: str) -> bool:
    """Whether a path of sft_data names episodes: the folder of a run, or a file of its journal."""
    target = Path(SlicedPath.of(path).path)
    is_file = target.name.endswith(SUFFIX) and _JOURNALS.match(target.name) is not None
    return is_file or target.parent.name == JOURNAL or (target / JOURNAL).is_dir()


def check_keys(config: SftConfig, paths: Sequence[str]) -> None:
    """Check that settings of conversations come with conversations, and those of episodes with episodes.

    Raises:
        ConfigError: one of them has no effect.
    """
    kinds = {is_journal(path) for path in paths}
    without = {
        "min_reward": (True, "episodes"),
        **dict.fromkeys(("messages_key", "tools_key"), (False, "files")),
    }
    for name, (kind, what) in without.items():
        default = SftSection.model_fields[name].default
        if getattr(config.sft, name) != default and kind not in kinds:
            raise ConfigError(f"{name} has no effect without {what} in sft_data; leave {name} out.")


def _entries(path: Path) -> Iterator[Entry]:
    """The episodes of a file of a journal; of a run's folder, those that it trained on or dropped; of one
    that was played without training, all."""
    steps, every = (sorted((path / JOURNAL).glob(f"{name}*{SUFFIX}")) for name in ("step_", ""))
    files = (steps or every) if path.is_dir() else [path]
    for file in files:
        try:
            yield from read_journal(file)
        except (OSError, ValueError) as error:
            raise DataError(f"{file} cannot be read as a journal: {error}.") from None


def _unusable(entry: Entry) -> str:
    """Why no part of an episode can be imitated; empty if one can."""
    episode = entry.episode
    if episode.ending is Ending.TRUNCATED:
        return TRUNCATED
    if episode.ending is not Ending.COMPLETED or not episode.turns:
        return FAILED
    trained = (turn for t in episode.trajectories if t.trainable for turn in t.turns)
    return NO_TOKENS if any(turn.tokens is None for turn in trained) else ""


def _imitated(sample: Sample) -> Sample:
    """A played Sample for imitation: its loss is that of the model itself, at temperature 1."""
    return replace(sample, temperatures=np.ones(len(sample), dtype=np.float32), extras={})
