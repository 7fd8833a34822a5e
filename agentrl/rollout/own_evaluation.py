"""Evaluations by a function: it decides what is played, and measures more than means."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeAlias

from agentrl.algorithms.contract import small_groups
from agentrl.errors import AgentRLError, StageError, UserError
from agentrl.rollout.batch_functions import own_metrics
from agentrl.runtime.event_loop import blocking, run_coroutine
from agentrl.runtime.stage import stage
from agentrl.types import Episode, Verdict


class PlayedPrompts(NamedTuple):
    """Held-out episodes in the order of their prompts, and verdicts of those that did not fail.

    mean: of the verdicts.
    """

    mean: float
    episodes: Sequence[Episode]
    verdicts: Sequence[Verdict]


Play: TypeAlias = Callable[[str, bool, int | None], Awaitable[PlayedPrompts]]
"""Plays a set of held-out prompts: its name, whether greedily, most prompts (None = as configured)."""


@dataclass(frozen=True, slots=True)
class EvaluationInPlay:
    """One evaluation, which a function plays.

    step: the iteration after which it is, 0 before the first. sets: the names of the sets of prompts, "" for
    a single one. plays: what `play` plays by.
    """

    step: int
    sets: Sequence[str]
    plays: Play

    async def play(
        self, name: str = "", *, greedy: bool = False, num_prompts: int | None = None
    ) -> PlayedPrompts:
        """Play a set as the run would: the journal and the metrics have it.

        name: of the set. greedy: at temperature 0, otherwise as episodes are sampled. num_prompts: most
        prompts (count); None = as configured.

        Raises:
            UserError: there is no such set, it has been played this way, or nothing could be measured.
        """
        if name not in self.sets:
            raise UserError(f"there is no held-out set {name!r}; the sets are {list(self.sets)}.")
        return await self.plays(name, greedy, num_prompts)

    async def play_all(self) -> None:
        """Play all that the run would play without a function: each set, sampled and greedily."""
        for name in self.sets:
            for greedy in (False, True):
                await self.play(name, greedy=greedy)


EvalFunction: TypeAlias = Callable[[EvaluationInPlay], Awaitable[Mapping[str, float] | None]]
"""Plays an evaluation; returns metrics of its own, which get the prefix `eval/`."""


async def evaluated(
    function: EvalFunction, evaluation: EvaluationInPlay, known: Callable[[], Mapping[str, float]]
) -> dict[str, float]:
    """The metrics of an evaluation function, with their prefix. known: those of what it has played.

    Raises:
        UserError: it failed, or returned no metrics.
        AgentRLError: what it played failed; as that was raised.
    """
    failed: list[AgentRLError] = []

    async def play(name: str, greedy: bool, num_prompts: int | None) -> PlayedPrompts:
        try:
            return await evaluation.plays(name, greedy, num_prompts)
        except AgentRLError as error:
            failed.append(error)
            raise

    try:
        async with stage("evaluation", None):
            returned = await function(replace(evaluation, plays=play))
            own = {f"eval/{name}": value for name, value in own_metrics(returned).items()}
            return own_metrics(own, known())
    except StageError as error:
        if failed:
            raise failed[0] from None
        raise UserError(f"the evaluation function failed ({error.detail}); mend it.") from error


def check_eval_function(function: EvalFunction) -> None:
    """Check that an evaluation function satisfies its contract: use it in the tests of your own.

    It evaluates a single set of eight prompts without a name, whose episodes end at once. It must return a
    mapping of names to finite numbers, or None.

    Raises:
        ValueError: the contract is violated; the message is one sentence.
    """
    try:
        blocking(lambda: run_coroutine(_tried(function)))
    except UserError as error:
        raise ValueError(str(error).removesuffix(".")) from None


async def _tried(function: EvalFunction) -> None:
    async def play(name: str, greedy: bool, num_prompts: int | None) -> PlayedPrompts:
        del name, greedy
        pairs = [(e, v) for g in small_groups() for e, v in zip(g.episodes, g.verdicts, strict=True)]
        pairs = pairs[:num_prompts]
        mean = sum(verdict.total for _, verdict in pairs) / len(pairs)
        return PlayedPrompts(mean, [e for e, _ in pairs], [v for _, v in pairs])

    await evaluated(function, EvaluationInPlay(0, ("",), play), dict)
