"""The catalogue: the registered environments by group, with what each needs.

    for entry in catalog(matching("ReasoningGym-*")):
        print(entry.id, entry.needs, entry.missing)

An entry is read from an instance: no task is made, and no episode is played.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from statistics import fmean

from agentrl.envs.base import GROUPS, BaseEnv, Env
from agentrl.envs.multi_agent import AgentView, AnyEnv, MultiAgentEnv
from agentrl.envs.registry import families, find
from agentrl.errors import UserError
from agentrl.runtime.extras import EXTRAS, is_installed


@dataclass(frozen=True, slots=True)
class CatalogEntry:
    """One environment, or a family of them as one entry.

    id: of a family, its pattern. members: the number of environments.
    group: a key of `GROUPS`, or a word of the package's own. description: the first line of the class.
    needs: extras and facilities beyond the core. missing: those extras that are not installed.
    expert_score, chance_score: as declared, of a family their means; None where the instance cannot be made.
    max_turns, max_tokens: the largest limits; max_tokens None = no limit.
    error: why it cannot be made; empty where it can.
    """

    id: str
    group: str
    description: str
    needs: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    has_expert: bool = False
    expert_score: float | None = None
    chance_score: float | None = None
    splits: tuple[str, ...] = ()
    tools: tuple[str, ...] = ()
    max_turns: int | None = None
    max_tokens: int | None = None
    members: int = 1
    error: str = ""


def catalog(ids: Iterable[str]) -> list[CatalogEntry]:
    """One entry for each id, ordered by group, then by id."""
    return sorted(map(_entry, ids), key=_place)


def by_family(entries: Sequence[CatalogEntry]) -> list[CatalogEntry]:
    """The same entries; those of a family are joined where all its members are among them."""
    by_id = {entry.id: entry for entry in entries}
    joined: list[CatalogEntry] = []
    for pattern, family in families().items():
        if family and all(id in by_id for id in family):
            joined.append(_joined(pattern, [by_id.pop(id) for id in sorted(family)]))
    return sorted([*by_id.values(), *joined], key=_place)


def view_of(env: AnyEnv) -> Env:
    """The environment as one of a single agent: of several agents, the first; scripts play the others."""
    return AgentView(env, env.possible_agents[0]) if isinstance(env, MultiAgentEnv) else env


def markdown(entries: Sequence[CatalogEntry]) -> Iterator[str]:
    """The lines of a Markdown table of each group: id, what it trains, needs, expert's score, tokens."""
    for group, rows in groupby(entries, key=lambda entry: entry.group):
        yield from (f"### {GROUPS.get(group, group).capitalize()}", "")
        yield "| id | what it trains | needs | expert | tokens |"
        yield "|---|---|---|---|---|"
        for entry in rows:
            yield f"| {' | '.join(_markdown_cells(entry))} |"
        yield ""


def _markdown_cells(entry: CatalogEntry) -> tuple[str, ...]:
    number = "" if entry.members == 1 else f", {entry.members} environments"
    expert = f"{entry.expert_score:.2f}" if entry.has_expert and entry.expert_score is not None else "none"
    tokens = "no limit" if entry.max_tokens is None else f"{entry.max_tokens:,}"
    needs = ", ".join(entry.needs) or "nothing"
    return f"`{entry.id}`{number}", entry.description, needs, expert, tokens


def _place(entry: CatalogEntry) -> tuple[int, str, str]:
    order = list(GROUPS)
    return order.index(entry.group) if entry.group in order else len(order), entry.group, entry.id


def _entry(id: str) -> CatalogEntry:
    try:
        env = find(id).described()
    except UserError as error:
        # One broken package must not hide all others.
        return CatalogEntry(id, "other", str(error), error=str(error))
    missing = tuple(name for name in env.needs if name in EXTRAS and not is_installed(name))
    tools, problem = ((), "") if missing else _tools(env)
    return CatalogEntry(
        id=id,
        group=env.group,
        description=summary(type(env)),
        needs=needs_of(env),
        missing=missing,
        has_expert=env.has_expert,
        expert_score=env.expert_score,
        chance_score=env.chance_score,
        splits=env.splits,
        tools=tools,
        max_turns=env.limits.max_turns,
        max_tokens=env.limits.max_tokens,
        error=problem,
    )


def needs_of(env: BaseEnv) -> tuple[str, ...]:
    """What an environment needs beyond the core; one without tasks of its own needs data."""
    has_data = bool(env.splits) or "data" in env.needs
    return (*env.needs, *(() if has_data else ("data",)))


def summary(env_class: type[BaseEnv]) -> str:
    """The first line of the class's docstring."""
    return (env_class.__doc__ or "").strip().split("\n")[0]


def _tools(env: AnyEnv) -> tuple[tuple[str, ...], str]:
    """The names of the tools, or none and the reason: the package of a game may be missing, or broken."""
    try:
        return tuple(tool.name for tool in env.tool_schemas), ""
    except UserError as error:
        return (), str(error)


def _joined(pattern: str, members: Sequence[CatalogEntry]) -> CatalogEntry:
    first = members[0]
    return CatalogEntry(
        id=pattern,
        group=first.group,
        description=first.description,
        needs=first.needs,
        missing=first.missing,
        has_expert=all(member.has_expert for member in members),
        expert_score=_mean([member.expert_score for member in members]),
        chance_score=_mean([member.chance_score for member in members]),
        splits=first.splits,
        tools=first.tools,
        max_turns=max((member.max_turns or 0 for member in members), default=None),
        max_tokens=_most([member.max_tokens for member in members]),
        members=len(members),
        error=next((member.error for member in members if member.error), ""),
    )


def _mean(values: Sequence[float | None]) -> float | None:
    numbers = [value for value in values if value is not None]
    return fmean(numbers) if numbers else None


def _most(values: Sequence[int | None]) -> int | None:
    return None if None in values else max(value for value in values if value is not None)
