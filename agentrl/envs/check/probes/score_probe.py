"""Checks that the expert reaches its score, and that random and adversarial policies stay at chance."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

from agentrl.envs.agents import discard
from agentrl.envs.check.arena import Arena, Policy, expert, failure_line, outcome
from agentrl.envs.check.findings import (
    Finding,
    ProbeResult,
    error,
    only_rewards,
    some,
    some_failures,
    warning,
)
from agentrl.envs.check.intervals import ROUNDING, Interval, interval
from agentrl.envs.check.policies import (
    ADVERSARIES,
    FORGING,
    KNOWING,
    gold_in_tools,
    misled,
    random_policy,
    repeating,
)
from agentrl.envs.check.probes.task_probe import CHARACTERS_PER_TOKEN, TOLERANCE
from agentrl.envs.check.wording import verifier_words
from agentrl.envs.normal_form import squad_normalize
from agentrl.envs.scoring import score
from agentrl.envs.values import OBSERVATION_CHARS
from agentrl.errors import StageError, UserError
from agentrl.runtime.stage import stage
from agentrl.types import Episode, Message, Task


class PlayedEpisodes(NamedTuple):
    """The outcomes of episodes of one policy.

    episodes: those that did not fail. scores: their scores, as in training. failures: one line for each that
    failed.
    """

    episodes: tuple[Episode, ...]
    scores: tuple[float, ...]
    failures: tuple[str, ...]


async def played(
    arena: Arena, policy: Policy, tasks: Sequence[Task], *, first: int = 0, leaves_at: int | None = None
) -> PlayedEpisodes:
    """One episode of each task, scored by the environment's steps and its rewards.

    first: the number of the first episode, which seeds it. leaves_at: as for `Arena.play`.
    """
    outcomes = [
        await outcome(arena.play(policy, task, number=number, leaves_at=leaves_at))
        for number, task in enumerate(tasks, start=first)
    ]
    ended = [episode for episode in outcomes if isinstance(episode, Episode)]
    began = time.perf_counter()
    scored = await score(ended, arena.example.rewards)
    if ended and arena.example.rewards:
        arena.seconds["rewards"].append((time.perf_counter() - began) / len(ended))
    failures = [line for line in outcomes if isinstance(line, str)]
    failures += [failure_line(episode) for episode in scored.episodes if episode.failure is not None]
    episodes = tuple(episode for episode in scored.episodes if episode.failure is None)
    return PlayedEpisodes(episodes, tuple(verdict.total for verdict in scored.verdicts), tuple(failures))


async def has_expert(arena: Arena) -> bool:
    """Whether the environment defines an expert, or inherits one that accepts the first task."""
    if not arena.example.has_expert:
        return False
    try:
        async with stage("expert", None):
            discard(arena.example.expert(arena.tasks[0]))
    except StageError:
        # Its episodes will fail in the same way.
        return True
    except UserError:
        return False
    return True


async def probe_expert(arena: Arena, n: int) -> tuple[ProbeResult, tuple[Episode, ...]]:
    """The expert over `n` tasks; and its episodes."""
    if not await has_expert(arena):
        text = (
            "not provable: without an `expert(task)` nothing shows that the tasks can be solved; write one."
        )
        return ProbeResult((warning("no-expert", text),)), ()
    result = await played(arena, expert, arena.some_tasks(n))
    if result.failures:
        failures = some_failures(result.failures)
        text = f"the expert's episode fails: {failures}; mend the environment or its expert."
        return ProbeResult((error("expert-fails", text),)), result.episodes
    declared = arena.example.expert_score
    bounds = interval(result.scores, (declared, arena.example.chance_score))
    episodes = result.episodes
    findings = [*_expert_findings(bounds, declared), *_too_long(episodes), *_expert_lengths(episodes)]
    figures = {"expert_score": bounds.mean, "expert_score_low": bounds.low, "expert_score_high": bounds.high}
    return ProbeResult(tuple(findings), figures), episodes


def _expert_findings(bounds: Interval, declared: float) -> list[Finding]:
    measured = f"scores {bounds.mean:.3f} (99.9% interval {bounds.low:.3f} to {bounds.high:.3f})"
    if bounds.high < declared - ROUNDING:
        text = (
            f"the expert {measured}, expert_score is {declared:g}; mend the expert, the reward or the number."
        )
        return [error("expert-falls-short", text)]
    if bounds.low > declared + ROUNDING:
        text = f"the expert {measured}, expert_score is only {declared:g}; raise it, so that a fault shows."
        return [warning("expert-score-too-low", text)]
    return []


def _expert_lengths(episodes: Sequence[Episode]) -> list[Finding]:
    limits = episodes[0].limits
    if limits.max_tokens is None:
        return []
    longest = max(episodes, key=_characters)
    tokens = _characters(longest) // CHARACTERS_PER_TOKEN
    if tokens <= limits.max_tokens:
        return []
    text = (
        f"the expert's episode of {longest.task.id} takes about {tokens} tokens, max_tokens is "
        f"{limits.max_tokens}; raise limits.max_tokens or shorten what the world says."
    )
    return [warning("expert-too-long", text)]


def _characters(episode: Episode) -> int:
    observed = sum(len(message.text) for turn in episode.turns for message in turn.observation)
    acted = sum(len(turn.action.text) + len(_argument_text(turn.action)) for turn in episode.turns)
    return observed + acted


def _argument_text(action: Message) -> str:
    return " ".join(str(call.arguments) for call in action.tool_calls)


def answering(episodes: Sequence[Episode]) -> frozenset[str]:
    """The tools whose arguments held the answer."""
    return frozenset(name for episode in episodes for name in _answering(episode))


def _answering(episode: Episode) -> set[str]:
    gold = squad_normalize(episode.task.answer or "")
    return {
        call.name
        for turn in episode.turns
        for call in turn.action.tool_calls
        if gold and f" {gold} " in f" {squad_normalize(' '.join(map(str, (call.arguments or {}).values())))} "
    }


async def probe_chance(arena: Arena, n: int, by_expert: Sequence[Episode], *, misleads: bool) -> ProbeResult:
    """Random play over `n` tasks, each adversary over a quarter of them.

    by_expert: the expert's episodes. misleads: whether the expert of another task is an adversary, too.
    """
    few = arena.some_tasks(max(4, n // 4))
    outcomes = {"random": await played(arena, random_policy, arena.some_tasks(n))}
    for name, policy in _adversaries(arena, answering(by_expert)).items():
        outcomes[name] = await played(arena, policy, few)
    if misleads and len({task.answer for task in arena.tasks}) > 1:
        outcomes["another task's answer"] = _of_another(await played(arena, misled(arena.tasks), few), few)
    chance, best = arena.example.chance_score, arena.example.expert_score
    allowed = chance + TOLERANCE * (best - chance) + ROUNDING
    bounds = {
        name: interval(result.scores, (chance, best)) for name, result in outcomes.items() if result.episodes
    }
    above = [f"{name} ({bound.mean:.3f})" for name, bound in bounds.items() if bound.low > allowed]
    failed = [f"{name}: {result.failures[0]}" for name, result in outcomes.items() if result.failures]
    findings = []
    if failed:
        text = f"what a model writes must never break the world, but: {some_failures(failed)}"
        remedy = "give every answer a finite reward" if only_rewards(failed) else "answer it with a sentence"
        findings.append(error("crash", f"{text}; {remedy}."))
    if above:
        text = f"policies that do not solve the task earn more than chance_score = {chance:g}: {some(above)}."
        findings.append(error("above-chance", f"{text} Mend the reward, or raise chance_score."))
    findings += _too_long([episode for result in outcomes.values() for episode in result.episodes])
    highest = max((bound.mean for name, bound in bounds.items() if name != "random"), default=chance)
    random_mean = bounds["random"].mean if "random" in bounds else chance
    played_policies = float(len(outcomes))
    figures = {"random_score": random_mean, "best_adversary_score": highest, "policies": played_policies}
    if "empty" in bounds:
        figures["floor_score"] = bounds["empty"].mean
    return ProbeResult(tuple(findings), figures)


def _of_another(result: PlayedEpisodes, tasks: Sequence[Task]) -> PlayedEpisodes:
    """Without the episodes that found the right answer after all, as an expert of a game does.

    And without those in which the expert itself failed: it need not know what to do in another task's world.
    """
    kept = [
        (episode, total)
        for episode, total in zip(result.episodes, result.scores, strict=True)
        if not _says_answer(episode)
    ]
    episodes, scores = tuple(episode for episode, _ in kept), tuple(total for _, total in kept)
    of_expert = tuple(f"{task.id}: act " for task in tasks)
    failures = tuple(line for line in result.failures if not line.startswith(of_expert))
    return PlayedEpisodes(episodes, scores, failures)


def _says_answer(episode: Episode) -> bool:
    gold = squad_normalize(episode.task.answer or "")
    said = (f"{turn.action.text} {_argument_text(turn.action)}" for turn in episode.turns)
    return any(f" {gold} " in f" {squad_normalize(text)} " for text in said)


def _adversaries(arena: Arena, answered_in: frozenset[str]) -> dict[str, Policy]:
    chosen = {**ADVERSARIES, "the verifier's own words": repeating("\n".join(verifier_words(arena.example)))}
    if not all(task.answer for task in arena.tasks):
        return chosen
    chosen |= KNOWING
    if arena.example.tool_schemas:
        chosen |= {**FORGING, "answer in a tool's argument": gold_in_tools(answered_in)}
    return chosen


def _too_long(episodes: Sequence[Episode]) -> list[Finding]:
    findings = []
    texts = [(episode, message.text) for episode in episodes for message in _answers(episode)]
    if long := [(e.task.id, len(text)) for e, text in texts if len(text) > OBSERVATION_CHARS]:
        task, length = max(long, key=lambda pair: pair[1])
        text = (
            f"one message of the world has {length} characters (task {task}), {OBSERVATION_CHARS} are "
            "allowed; cut what the world says."
        )
        findings.append(error("observation-unbounded", text))
    return findings


def _answers(episode: Episode) -> list[Message]:
    return [message for turn in episode.turns for message in turn.observation]
