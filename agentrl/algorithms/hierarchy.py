"""Hierarchical credit for several agents: what they share a role with, and whose rewards they share."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Annotated, ClassVar

from pydantic import Field, model_validator

from agentrl.algorithms.advantages import AdvantageEstimator, Advantages
from agentrl.algorithms.tokens import Tokens, TokenScores
from agentrl.config import Section
from agentrl.types import Episode, Group, Rollout, RolloutId, Verdict

_Finite = Annotated[float, Field(allow_inf_nan=False)]


def role_of(agent: str, roles: Mapping[str, str]) -> str:
    """The role of an agent: that of the first name or pattern (`searcher_*`) that fits, else its own name."""
    return next((role for pattern, role in roles.items() if fnmatchcase(agent, pattern)), agent)


@dataclass(frozen=True, slots=True)
class Hierarchy:
    """Which agents are siblings, and whose rewards include those of others.

    roles: the role of an agent by its name or a pattern. The rollouts of one role in a group are siblings,
        any number of them in each episode; each counts the same. One without a turn is none: a sub-agent that
        was not called.
    reward_shares: by role, shares c of the rewards of other roles. A rollout is compared by

            reward + sum over other roles of c x mean reward of that role's rollouts in the episode

        where the rewards on the right are those before any shares. A role without a rollout in the episode
        adds nothing. Rewards of turns stay: what is added counts at the last turn.

    Source: https://arxiv.org/abs/2511.13288 (M-GRPO): the main agent and the sub-agents are compared within
    their own role, and the reward of a sub-agent includes what the main agent achieved in the episode. There
    batches of a fixed size are made of any number of sub-agents; here each rollout is used once.
    """

    roles: Mapping[str, str] = field(default_factory=dict)
    reward_shares: Mapping[str, Mapping[str, float]] = field(default_factory=dict)

    def by_role(self, group: Group) -> Group:
        """The group as estimators compare it: each rollout with a turn is an episode of its own, of an agent
        with the name of its role. Their ids are those of `renamed`."""
        episodes: list[Episode] = []
        verdicts: list[Verdict] = []
        for episode in group.episodes:
            played = [v for v in group.verdicts_of(episode) if episode.turns_of(v.agent)]
            means = self._means(played)
            for verdict in played:
                own = self._part(Rollout(episode, verdict), means)
                episodes.append(own.episode)
                verdicts.append(own.verdict)
        return replace(group, episodes=tuple(episodes), verdicts=tuple(verdicts))

    def renamed(self, id: RolloutId) -> RolloutId:
        """The id of a rollout in the groups of `by_role`."""
        return RolloutId(f"{id.episode}/{id.agent}", role_of(id.agent, self.roles))

    def check_agents(self, agents: Sequence[str]) -> None:
        """Check that the agents of an environment have the roles that are named.

        Raises:
            ValueError: no agent has a role, or a name or pattern fits none.
        """
        present = dict.fromkeys(role_of(agent, self.roles) for agent in agents)
        named = dict.fromkeys(name for role, shares in self.reward_shares.items() for name in (role, *shares))
        if strangers := [name for name in named if name not in present]:
            raise ValueError(
                f"hierarchy_reward_shares names {', '.join(strangers)}, which no agent has as its role; name "
                f"some of {', '.join(present)}."
            )
        if idle := [p for p in self.roles if not any(fnmatchcase(agent, p) for agent in agents)]:
            raise ValueError(
                f"hierarchy_roles names {', '.join(idle)}, and no agent is called so; the agents are "
                f"{', '.join(agents)}."
            )

    def _means(self, verdicts: Sequence[Verdict]) -> dict[str, float]:
        """The mean reward of each role in one episode."""
        totals: dict[str, list[float]] = {}
        for verdict in verdicts:
            totals.setdefault(role_of(verdict.agent, self.roles), []).append(verdict.total)
        return {role: math.fsum(own) / len(own) for role, own in totals.items()}

    def _part(self, rollout: Rollout, means: Mapping[str, float]) -> Rollout:
        """One agent's part of an episode as an episode, and what it is compared by."""
        episode, verdict = rollout
        id = self.renamed(verdict.rollout_id)
        shares = self.reward_shares.get(id.agent, {})
        added = math.fsum(share * means.get(role, 0.0) for role, share in shares.items())
        own = [trajectory for trajectory in episode.trajectories if trajectory.agent == verdict.agent]
        part = replace(
            episode,
            id=id.episode,
            trajectories=tuple(
                replace(t, agent=id.agent, parent=None if t.parent is None else k - 1)
                for k, t in enumerate(own)
            ),
            step_rewards=(),
            agents=(id.agent,),
            frozen_agents=(id.agent,) if verdict.agent in episode.frozen_agents else (),
        )
        changed = replace(verdict, episode_id=id.episode, agent=id.agent, total=verdict.total + added)
        return Rollout(part, changed)


@dataclass(frozen=True, slots=True)
class Hierarchical:
    """An estimator that gets the rollouts of each role as siblings, with the rewards of a hierarchy."""

    estimator: AdvantageEstimator
    hierarchy: Hierarchy

    def __call__(self, groups: Sequence[Group], tokens: Tokens, scores: TokenScores) -> Advantages:
        """Advantages of `tokens`.

        Raises:
            ValueError: raised by the estimator.
        """
        by_role = [self.hierarchy.by_role(group) for group in groups]
        renamed = replace(tokens, rollout_ids=tuple(map(self.hierarchy.renamed, tokens.rollout_ids)))
        return self.estimator(by_role, renamed, scores)


class HierarchyConfig(Section):
    """Several agents in one role, and rewards that include what another role has achieved."""

    prefix: ClassVar[str] = "hierarchy"

    roles: dict[str, str] = Field(default_factory=dict)
    """Role of each agent by its name or a pattern, such as {"searcher_*" = "searcher"}: agents of one role
    are siblings, also in one episode; left out, each agent is a role of its own (a table; as a flag:
    JSON)."""
    reward_shares: dict[str, dict[str, _Finite]] = Field(default_factory=dict)
    """For a role, shares of the mean rewards of other roles in the episode that are added to its own reward,
    such as {searcher = {planner = 0.5}} (a table; as a flag: JSON)."""

    @property
    def is_set(self) -> bool:
        """Whether anything of it applies."""
        return bool(self.roles or self.reward_shares)

    @model_validator(mode="after")
    def _names(self) -> HierarchyConfig:
        if empty := [pattern for pattern, role in self.roles.items() if not (pattern and role)]:
            raise ValueError(f"hierarchy_roles needs a name and a role, got {empty[0]!r}; leave it out.")
        for role, shares in self.reward_shares.items():
            if not shares or role in shares:
                raise ValueError(
                    f"hierarchy_reward_shares of {role} must name other roles, such as "
                    f"{{{role} = {{planner = 0.5}}}}; name some, or leave it out."
                )
            for name in (role, *shares):
                if (own := role_of(name, self.roles)) != name:
                    raise ValueError(
                        f"hierarchy_reward_shares names {name}, which hierarchy_roles gives the role {own}; "
                        "name the role."
                    )
        return self
