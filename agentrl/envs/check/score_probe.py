"""The expert reaches its score; policies that know nothing, or cheat, stay at chance and break nothing."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

from agentrl.envs.base import Env
from agentrl.envs.check.arena import Arena, Policy, expert, failure_line, outcome
from agentrl.envs.check.intervals import ROUNDING, Interval, interval
from agentrl.envs.check.policies import ADVERSARIES, FORGING, KNOWING, gold_in_tools, random_policy
from agentrl.envs.check.report import Finding, Probed, error, some, warning
from agentrl.envs.check.task_probe import CHARACTERS_PER_TOKEN, TOLERANCE
from agentrl.envs.scoring import score, squad_normalize
from agentrl.errors import UserError
from agentrl.types import Episode, Message, Task

LONGEST_OBSERVATION = 65_536
"""Characters of one message of the world: more cannot be meant for a model."""


class Played(NamedTuple):
    """What several episodes of one policy came to.

    episodes: those that did not fail. scores: theirs, as training would see them. failures: one line for
    each that did.
    """

    episodes: tuple[Episode, ...]
    scores: tuple[float, ...]
    failures: tuple[str, ...]


async def played(arena: Arena, policy: Policy, tasks: Sequence[Task]) -> Played:
    """One episode of each task, scored by the environment's steps and its rewards."""
    came = [await outcome(arena.play(policy, task, number=number)) for number, task in enumerate(tasks)]
    ended = [one for one in came if isinstance(one, Episode)]
    began = time.perf_counter()
    scored = await score(ended, arena.example.rewards)
    if ended and arena.example.rewards:
        arena.seconds["rewards"].append((time.perf_counter() - began) / len(ended))
    failures = [one for one in came if isinstance(one, str)]
    failures += [failure_line(one) for one in scored.episodes if one.failure is not None]
    episodes = tuple(one for one in scored.episodes if one.failure is None)
    return Played(episodes, tuple(verdict.total for verdict in scored.verdicts), tuple(failures))


def has_expert(arena: Arena) -> bool:
    """Whether the environment has written an expert, or inherited one that solves the first task."""
    if type(arena.example).expert is Env.expert:
        return False
    try:
        arena.example.expert(arena.tasks[0]).close()
    except UserError:
        return False
    return True


async def probe_expert(arena: Arena, n: int) -> tuple[Probed, frozenset[str]]:
    """The expert over `n` tasks; and the tools whose arguments it gave the answer in."""
    if not has_expert(arena):
        text = (
            "not provable: without an `expert(task)` nothing shows that the tasks can be solved; write one."
        )
        return Probed((warning("no-expert", text),)), frozenset()
    came = await played(arena, expert, arena.some_tasks(n))
    answered_in = frozenset(name for episode in came.episodes for name in _answering(episode))
    if came.failures:
        text = f"the expert's episode fails ({some(came.failures)}); mend the environment or its expert."
        return Probed((error("expert-fails", text),)), answered_in
    declared = arena.example.expert_score
    bounds = interval(came.scores, (declared, arena.example.chance_score))
    found = [*_expert_findings(bounds, declared), *_too_long(came.episodes), *_expert_lengths(came.episodes)]
    figures = {"expert_score": bounds.mean, "expert_score_low": bounds.low, "expert_score_high": bounds.high}
    return Probed(tuple(found), figures), answered_in


def _expert_findings(bounds: Interval, declared: float) -> list[Finding]:
    said = f"scores {bounds.mean:.3f} (99.9% interval {bounds.low:.3f} to {bounds.high:.3f})"
    if bounds.high < declared - ROUNDING:
        text = f"the expert {said}, expert_score is {declared:g}; mend the expert, the reward or the number."
        return [error("expert-falls-short", text)]
    if bounds.low > declared + ROUNDING:
        text = f"the expert {said}, expert_score is only {declared:g}; raise it, so that a fault shows."
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
    heard = sum(len(message.text) for turn in episode.turns for message in turn.observation)
    said = sum(len(turn.action.text) + len(_argument_text(turn.action)) for turn in episode.turns)
    return heard + said


def _argument_text(action: Message) -> str:
    return " ".join(str(one.arguments) for one in action.tool_calls)


def _answering(episode: Episode) -> set[str]:
    gold = squad_normalize(episode.task.answer or "")
    return {
        one.name
        for turn in episode.turns
        for one in turn.action.tool_calls
        if gold and f" {gold} " in f" {squad_normalize(' '.join(map(str, (one.arguments or {}).values())))} "
    }


async def probe_chance(arena: Arena, n: int, answered_in: frozenset[str]) -> Probed:
    """Random play over `n` tasks, each adversary over a quarter of them."""
    few = arena.some_tasks(max(4, n // 4))
    outcomes = {"random": await played(arena, random_policy, arena.some_tasks(n))}
    for name, policy in _adversaries(arena, answered_in).items():
        outcomes[name] = await played(arena, policy, few)
    chance, best = arena.example.chance_score, arena.example.expert_score
    allowed = chance + TOLERANCE * (best - chance) + ROUNDING
    bounds = {name: interval(one.scores, (chance, best)) for name, one in outcomes.items() if one.episodes}
    paid = [f"{name} ({one.mean:.3f})" for name, one in bounds.items() if one.low > allowed]
    failed = [f"{name}: {one.failures[0]}" for name, one in outcomes.items() if one.failures]
    found = []
    if failed:
        text = (
            f"what a model writes must never break the world, but: {some(failed)}; answer it with a sentence."
        )
        found.append(error("crash", text))
    if paid:
        text = f"policies that do not solve the task earn more than chance_score = {chance:g}: {some(paid)}."
        found.append(error("above-chance", f"{text} Mend the reward, or raise chance_score."))
    found += _too_long([episode for one in outcomes.values() for episode in one.episodes])
    highest = max((one.mean for name, one in bounds.items() if name != "random"), default=chance)
    random_mean = bounds["random"].mean if "random" in bounds else chance
    played_policies = float(len(outcomes))
    figures = {"random_score": random_mean, "best_adversary_score": highest, "policies": played_policies}
    return Probed(tuple(found), figures)


def _adversaries(arena: Arena, answered_in: frozenset[str]) -> dict[str, Policy]:
    chosen = dict(ADVERSARIES)
    if not all(task.answer for task in arena.tasks):
        return chosen
    chosen |= KNOWING
    if arena.example.tool_schemas:
        chosen |= {**FORGING, "answer in a tool's argument": gold_in_tools(answered_in)}
    return chosen


def _too_long(episodes: Sequence[Episode]) -> list[Finding]:
    found = []
    said = [(episode, message.text) for episode in episodes for message in _answers(episode)]
    if long := [(e.task.id, len(text)) for e, text in said if len(text) > LONGEST_OBSERVATION]:
        task, length = max(long, key=lambda pair: pair[1])
        text = (
            f"one message of the world has {length} characters (task {task}), {LONGEST_OBSERVATION} are "
            "allowed; cut what the world says."
        )
        found.append(error("observation-unbounded", text))
    if broken := [e.task.id for e, text in said if not _is_utf8(text)]:
        text = f"the world says text that is no UTF-8 ({some(broken)}); drop lone surrogates from it."
        found.append(error("observation-not-utf8", text))
    return found


def _answers(episode: Episode) -> list[Message]:
    return [message for turn in episode.turns for message in turn.observation]


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
