"""The environment of one category."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from agentrl import Chat, Limits, Message, Script, Step, Task, ToolEnv, UserError, call, say
from agentrl.tools import JSON, Tool, ToolSchema, run
from envs_contrib.bfcl.data import CATEGORIES, Entry, added_functions_text, entries, functions
from envs_contrib.bfcl.world import Conversation

_MOST_CALLING = 20
"""Model turns with calls within one turn of the user, as in the benchmark."""
_LONG_TOKENS, _TOKENS = 131_072, 32_768


class BFCL(ToolEnv):
    """A user asks for several things, one after another, of systems that are functions on offer.

    The conversations of several turns of BFCL v4, with its own systems, functions and checks. A turn of the
    user ends with the model's first message without a call. It is right where the systems are then in the
    state, and the results of all calls so far contain the results, that the benchmark's right calls give. An
    episode pays 1.0 where all turns are right, else 0.0; it ends with the first one that is not.

    category: base; miss_func, where a function is on offer only from a later turn on; miss_param, where the
        user says something needed only later; long_context, where results are long.
    held_out: of the conversations every n-th is in the split `test`, the others are in `train`; 0 = all are
        in `test`, as in the benchmark.

    counts: turns, those that were right.

    Raises:
        UserError: there is no such category, or, at the first use, `bfcl-eval` is not installed.
    """

    group = "tools"
    needs = ("bfcl-eval",)
    splits: tuple[str, ...] = ("test",)
    dialect = Chat()
    limits = Limits(max_turns=100, max_tokens=_TOKENS, max_tool_chars=60_000)

    def __init__(self, category: str, held_out: int = 0) -> None:
        super().__init__()
        if category not in CATEGORIES:
            raise UserError(f"BFCL has no category `{category}`; it has {', '.join(CATEGORIES)}.")
        if held_out < 0 or held_out == 1:
            raise UserError(f"held_out is 0 or at least 2, got {held_out}; 4 holds out every fourth task.")
        if held_out:
            self.splits = ("train", "test")
        # One of its 200 needs a function before that is on offer, in the benchmark, too.
        self.expert_score = 0.995 if category == "miss_func" else 1.0
        if category == "long_context":
            self.limits = replace(self.limits, max_tokens=_LONG_TOKENS)
        self._category, self._held_out = category, held_out
        self._conversation: Conversation | None = None
        self._num_calling = 0

    def tasks(self, split: str) -> Sequence[Task]:
        """The conversations of a split."""
        n = self._held_out
        return [
            Task.ask(id, entry.turns[0], split=split)
            for number, (id, entry) in enumerate(entries(self._category).items())
            if (not n or number % n == 0) == (split == "test")
        ]

    def corpus(self) -> Iterable[str]:
        """What the users say, and the functions."""
        for entry in entries(self._category).values():
            yield from entry.turns
        for name in sorted({name for entry in entries(self._category).values() for name in entry.classes}):
            yield from (function.description for function in functions(name))

    async def reset(self, task: Task, *, seed: int) -> tuple[tuple[Message, ...], Mapping[str, JSON]]:
        """Begin a conversation.

        Raises:
            UserError: the task is none of the benchmark's.
        """
        entry = self._entry(task)
        self._conversation, self._num_calling = Conversation(entry), 0
        late = {name for names in entry.late.values() for name in names}
        self._offer(name for name in _names(entry) if name not in late)
        return await super().reset(task, seed=seed)

    async def step(self, action: Message) -> Step:
        """Answer the calls, or end the user's turn and say what they ask for next."""
        played = self._conversation
        if played is None:
            return await super().step(action)
        if action.tool_calls:
            self._num_calling += 1
            if self._num_calling > _MOST_CALLING:
                played.is_right = False
                return Step.finished(reward=0.0)
            return await super().step(action)
        await run(played.end_turn, thread="comparison")
        self._num_calling = 0
        self.counts["turns"] += int(played.is_right)
        if played.has_ended or not played.is_right:
            return await super().step(action)
        names = played.entry.late.get(played.turn, ())
        self._offer(names)
        return Step.going(
            Message("user", added_functions_text() if names else played.entry.turns[played.turn])
        )

    def reward(self, task: Task, answer: str) -> float:
        """1.0 where every turn was right, else 0.0."""
        del task, answer
        played = self._conversation
        return float(played is not None and played.has_ended and played.is_right)

    def expert(self, task: Task) -> Script:
        """The benchmark's right calls, turn by turn."""
        for calls in self._entry(task).right:
            at_once = 1 + len(calls) // _MOST_CALLING
            for start in range(0, len(calls), at_once):
                made = [call(name, **arguments) for name, arguments in calls[start : start + at_once]]
                yield Message("assistant", tool_calls=tuple(one for each in made for one in each.tool_calls))
            yield say("Done." if calls else "I cannot do that yet.")

    def _entry(self, task: Task) -> Entry:
        entry = entries(self._category).get(task.id)
        if entry is None:
            raise UserError(f"{self.id} plays its own tasks only; leave out prompt_data.")
        return entry

    def _offer(self, names: Iterable[str]) -> None:
        assert self._conversation is not None
        chosen, played = frozenset(names), self._conversation
        schemas = [schema for name in played.entry.classes for schema in functions(name)]
        self.offer(
            *(
                replace(
                    Tool.described(_anything(schema), partial(_called, played, schema.name)), schema=schema
                )
                for schema in schemas
                if schema.name in chosen
            )
        )


async def _called(played: Conversation, name: str, /, **arguments: JSON) -> str:
    return str(await run(partial(played.call, name, **arguments), thread="function"))


def _anything(schema: ToolSchema) -> ToolSchema:
    """The benchmark runs a call whatever its arguments are: what does not fit is an error of the function."""
    return schema._replace(parameters={"type": "object"})


def _names(entry: Entry) -> list[str]:
    return [function.name for name in entry.classes for function in functions(name)]
