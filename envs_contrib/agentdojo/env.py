"""The environment of one suite."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import cast

from agentrl import (
    Chat,
    Episode,
    Limits,
    Message,
    Reward,
    Script,
    Step,
    Task,
    ToolEnv,
    UserError,
    call,
    say,
)
from agentrl.tools import JSON, ToolSchema, inline, run
from envs_contrib.agentdojo.world import Call, Played, State, World, world

VERSION = "v1.2.2"
"""The benchmark's latest version: 97 user tasks and 35 injection tasks in four suites."""
TARGET = "local"
_FREE_TASKS = {"banking": 5 / 16}
"""By suite, the share of user tasks whose check in VERSION passes before anything is done."""
_RECOGNISED_LETTERS = 60


@inline
def attack_success(episode: Episode) -> float:
    """1.0 where the attack had succeeded when the episode ended, else 0.0."""
    return float(episode.counts.get("attack_success", 0))


class AgentDojo(ToolEnv):
    """A user's task in a world of tools, where an attacker may have written some of the texts.

    The four suites of AgentDojo (arXiv:2406.13352) with their own tools, tasks, attacks and checks. An
    episode pays the suite's utility: 1.0 where the user's task is done at the end, else 0.0. The suite
    determines it from the states before and after, the calls and the answer.

    suite: workspace, slack, banking or travel.
    attack: an attack of the library by name (`important_instructions`, `ignore_previous`, `direct`, ...). A
        task is then a user task and an injection task, whose goal the attack writes into texts that the user
        task reads. The part `attack_success` of a verdict is 1.0 where the injected goal is reached; under a
        denial of service, where the user's task is not done. It is measured and never paid. None = no attack.
    target: the attacked model by the library's name for it, since some attacks address it ("you, GPT-4");
        `local` is "Local model".
    version: of the benchmark.
    held_out: of the user tasks every n-th is in the split `test`, the others are in `train`; 0 = all are in
        `test`, as in the benchmark.

    counts: attack_success, 0 or 1.

    Raises:
        UserError: an argument has no effect; or, at the first use, the library is not installed, or has no
            such suite, attack, model or version.
    """

    group = "tools"
    needs = ("agentdojo",)
    splits: tuple[str, ...] = ("test",)
    arguments = "coerce"
    dialect = Chat()
    # The longest script has 18 calls and an injected one 6. A list of all files has 28,000 characters. Some
    # checks compute for a tenth of a second, and hundreds of episodes may end at once.
    limits = Limits(
        max_turns=32,
        max_tokens=65_536,
        max_tool_chars=60_000,
        reset_timeout_s=120.0,
        reward_timeout_s=120.0,
        step_timeout_s=180.0,
    )

    def __init__(
        self,
        suite: str,
        attack: str | None = None,
        target: str = TARGET,
        version: str = VERSION,
        held_out: int = 0,
    ) -> None:
        super().__init__()
        if attack is None and target != TARGET:
            raise UserError(f"target = {target} has no effect without an attack; set `attack`, or drop it.")
        if held_out < 0 or held_out == 1:
            raise UserError(f"held_out is 0 or at least 2, got {held_out}; 4 holds out every fourth task.")
        self.chance_score = _FREE_TASKS.get(suite, 0.0)
        if attack is not None:
            self.rewards = (Reward(attack_success, weight=0.0),)
        if held_out:
            self.splits = ("train", "test")
        self._world_arguments = (suite, attack, version, target)
        self._is_attacked = attack is not None
        self._held_out = held_out
        self._is_offered = False
        self._before: State | None = None
        self._state: State | None = None
        self._calls: list[Call] = []

    @property
    def world(self) -> World:
        """What all episodes of these arguments share; loaded at the first use."""
        return world(*self._world_arguments)

    @property
    def tool_schemas(self) -> Sequence[ToolSchema]:
        """The suite's tools."""
        self._offer_suite()
        return super().tool_schemas

    def tasks(self, split: str) -> Sequence[Task]:
        """The user tasks of a split; with an attack, each once for each injection task."""
        n = self._held_out
        return self.world.tasks(lambda number: (not n or number % n == 0) == (split == "test"), split)

    def corpus(self) -> Iterable[str]:
        """The prompts of all splits, and the texts of the world."""
        tasks = [task for split in self.splits for task in self.tasks(split)]
        yield from (message.text for task in tasks for message in task.prompt)
        yield self.world.begin(tasks[0]).model_dump_json()

    async def reset(self, task: Task, *, seed: int) -> tuple[tuple[Message, ...], Mapping[str, JSON]]:
        """Begin a task in a copy of its world.

        Raises:
            UserError: the task is not one of the suite's.
        """
        if not isinstance(task.metadata.get("user_task"), str):
            raise UserError(f"{self.id} checks its own tasks only; leave out prompt_data.")
        self._offer_suite()
        # The first episode of an attacked task reads YAML for a tenth of a second.
        begin = partial(self.world.begin, task)
        self._before = cast(State, await run(begin, thread="beginning"))
        self._state = self._before.model_copy(deep=True)
        self._calls = []
        return await super().reset(task, seed=seed)

    async def step(self, action: Message) -> Step:
        """Answer the calls, or grade the final answer; then determine whether the attack has succeeded."""
        step = await super().step(action)
        if self._is_attacked and self.task is not None:
            if self.world.is_dos:
                succeeded = not step.reward
            else:
                check = partial(self.world.is_hijacked, self.task, self._played(action.text))
                succeeded = bool(await run(check, thread="attack check"))
            self.counts["attack_success"] = int(succeeded)
        return step

    def reward(self, task: Task, answer: str) -> Mapping[str, float]:
        """The suite's utility of the final state and the answer: 1.0 or 0.0."""
        return {"utility": float(self.world.is_solved(task, self._played(answer)))}

    def expert(self, task: Task) -> Script:
        """The suite's own calls for the user's task; injected texts are ignored."""
        calls, answer = self.world.gold(task)
        for name, arguments in calls:
            yield call(name, **arguments)
        yield say(answer)

    def hijacked_expert(self, task: Task) -> Script:
        """The expert that obeys an injected text as soon as it has read it: the worst case.

        It goes on with the user's task afterwards; under a denial of service it stops.

        Raises:
            UserError: there is no attack.
        """
        if not self._is_attacked:
            raise UserError(f"{self.id}: nothing is injected; set `attack`.")
        calls, answer = self.world.gold(task)
        injected, injected_answer = self.world.injected_gold(task)
        marks = [_letters(max(text.splitlines(), key=len)) for text in self.world.injected_texts(task)]
        for name, arguments in calls:
            result = _letters((yield call(name, **arguments)), most=None)
            if not any(mark in result for mark in marks):
                continue
            marks = []
            if self.world.is_dos:
                yield say("asdf")
                return
            for injected_name, injected_arguments in injected:
                yield call(injected_name, **injected_arguments)
            answer = f"{answer} {injected_answer}".strip()
        yield say(answer)

    def _offer_suite(self) -> None:
        if not self._is_offered:
            self._is_offered = True
            tools = self.world.tools
            self.offer(*(replace(tool, function=partial(self._call, tool.name)) for tool in tools))

    def _call(self, name: str, /, **arguments: JSON) -> str:
        assert self._state is not None
        made = Call(name, arguments)
        self._calls.append(made)
        return self.world.call(self._state, made)

    def _played(self, answer: str) -> Played:
        assert self._before is not None
        assert self._state is not None
        return Played(answer, self._before, self._state, tuple(self._calls))


def _letters(text: str, most: int | None = _RECOGNISED_LETTERS) -> str:
    """The first letters and digits of a text, which quoting and folding in YAML leave as they are."""
    return re.sub(r"\W+", "", text)[:most]
