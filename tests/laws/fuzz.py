"""Random conversations by the thousand: every dialect, every kind of tokenizer, sense and nonsense.

A conversation is a function of its seed. The policy recites tokens that nobody would sample on purpose;
the world answers with markup, rewrites its history, changes its tools. What the laws say of the result is
checked against books kept here, by the policy and by the world, and not by the code under test.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from agentrl import Env, Limits, Message, Step, Tags, Task, call, play, say
from agentrl.rendering.inline import InlineRenderer
from agentrl.rollout.agent import SamplingSettings, TokenAgent
from agentrl.tools import Tool
from agentrl.types import Completion, Episode, Finish, History, Restart
from agentrl.types.seams import Renderer, ToolSchema
from tests.rendering.subjects import CHATML, FORMATS, GLM, KINDS, LLAMA, renderer, tokenizer
from tests.worlds import add, echo

TAGS = Tags(result="facts")
TOOLS = (Tool.of(echo).schema, Tool.of(add).schema)
MARKUP = tuple(f"<{s}{name}>" for name in TAGS.names(tool.name for tool in TOOLS) for s in ("", "/"))
SPECIAL = tuple(dict.fromkeys((*CHATML, *LLAMA, *GLM, *MARKUP)))
WORDS = ("Kalor", " born", "12", "\n", "é", "🎉", " ", "{", '"', "<", "Tirak.", "東京", "\u2028", "a\tb")
BROKEN = (
    "<tool_call>",
    "</tool_call>",
    '{"name": "add", "arguments": {"a": 1',
    '<tool_call>{"name": 3}</tool_call>',
    "<tool_call>nothing</tool_call>",
    "<think>hm",
    "<echo>",
    "</echo>",
    "<add>1, 2</add>",
    "<answer>",
)


def inline(kind: str, *, special: bool) -> Callable[[], Renderer]:
    """A renderer of tags that are tokens of their own, or that the tokenizer splits."""
    markup = (*MARKUP, "<|end|>") if special else ("<|end|>",)
    return lambda: InlineRenderer(tokenizer(kind, markup, "<|end|>"), TAGS)


SUBJECTS: dict[str, Callable[[], Renderer]] = {
    f"{form}, {kind}": lambda form=form, kind=kind: renderer(form, kind) for form in FORMATS for kind in KINDS
}
SUBJECTS |= {f"tags are tokens, {kind}": inline(kind, special=True) for kind in KINDS}
SUBJECTS |= {f"tags are text, {kind}": inline(kind, special=False) for kind in KINDS}


@dataclass
class World(Env):
    """Answers at random, and records its observations and the actions."""

    dice: random.Random
    limits: Limits
    observations: list[tuple[Message, ...]] = field(default_factory=list)
    offered: list[tuple[ToolSchema, ...]] = field(default_factory=list)
    actions: list[Message] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()
        self._tools = TOOLS

    @property
    def tool_schemas(self):
        return self._tools

    def tasks(self, split):
        return ()

    async def reset(self, task, *, seed):
        self._note(task.prompt)
        return task.prompt, {}

    async def step(self, action):
        self.actions.append(action)
        if self.dice.random() < 0.12:
            return Step.finished(reward=1.0)
        if self.dice.random() < 0.1:
            self._tools = self._tools[::-1] if self.dice.random() < 0.5 else TOOLS[:1]
        if self.dice.random() < 0.1:
            rewritten = (
                Message("user", f"{text_of(self.dice)}?"),
                say(text_of(self.dice)),
                Message("user", "So?"),
            )
            history = History(rewritten[: self.dice.choice((1, 3))], self.dice.choice(list(Restart)))
            self._note(history)
            return Step(history, None, False, False, {})
        answers = tuple(
            Message("tool", text_of(self.dice), tool_call_id=tool_call.id, name=tool_call.name or "echo")
            for tool_call in action.tool_calls
            if tool_call.arguments is not None
        )
        if not answers or self.dice.random() < 0.1:
            answers += (Message("user", text_of(self.dice)),)
        self._note(answers)
        return Step.going(*answers)

    def _note(self, observation):
        self.observations.append(observation)
        self.offered.append(self._tools)


@dataclass
class Policy:
    """Recites turns and records its prompts; no two of its tokens have the same logprob.

    kinds: written as the dialect has it, cut into other tokens, broken markup, or any tokens at all.
    """

    turn: Callable[[str], list[int]]
    dice: random.Random
    version: int = 0
    kinds: list[str] = field(default_factory=list)
    prompts: list[list[int]] = field(default_factory=list)
    completions: list[Completion] = field(default_factory=list)

    async def generate(self, prompt_ids, sampling, *, session):
        self.prompts.append(list(prompt_ids))
        self.kinds.append(self.dice.choices(("written", "cut", "broken", "any"), (4, 3, 3, 1))[0])
        ids = self.turn(self.kinds[-1])
        is_complete = len(ids) <= sampling.max_new_tokens and self.dice.random() > 0.04
        ids = ids[: sampling.max_new_tokens]
        first = sum(len(completion.token_ids) for completion in self.completions) + 1
        self.version += self.dice.randrange(2)
        self.completions.append(
            Completion(
                np.array(ids, np.int32),
                -np.arange(first, first + len(ids), dtype=np.float32) / 64,
                np.full(len(ids), self.version, np.int32),
                Finish.STOP if is_complete else Finish.LENGTH,
                temperature=sampling.temperature,
            )
        )
        return self.completions[-1]

    async def close_session(self, session):
        del session


@dataclass
class Played:
    """A conversation that was had, and everybody's books."""

    renderer: Renderer
    episode: Episode
    world: World
    policy: Policy


def text_of(dice: random.Random) -> str:
    """A few words, among them what is markup to somebody."""
    pool = (WORDS, WORDS, WORDS, SPECIAL)
    return "".join(dice.choice(dice.choice(pool)) for _ in range(dice.randrange(7)))


async def play_seed(name: str, seed: int) -> Played:
    """The conversation of a subject and a seed."""
    dice = random.Random(f"{name}/{seed}")
    subject = SUBJECTS[name]()
    stops = subject.stops(TOOLS)
    roles = dice.choice((("user",), ("system", "user")))
    task = Task("t", tuple(Message(role, f"{text_of(dice)}?") for role in roles))
    max_tokens = len(subject.render(task.prompt, TOOLS)) + dice.choice((100, 10_000, 10_000))
    world = World(dice, Limits(max_turns=8, max_tokens=max_tokens))
    policy = Policy(lambda kind: _turn(dice, subject, stops.token_ids, kind), dice)
    agent = TokenAgent(policy, subject, SamplingSettings())
    episode = await play(world, agent, task, episode_id=f"{name}/{seed}")
    return Played(subject, episode, world, policy)


def _turn(dice: random.Random, subject: Renderer, stops: tuple[int, ...], kind: str) -> list[int]:
    tokens = subject._tokenizer
    if kind == "any":
        ids = [dice.randrange(len(tokens)) for _ in range(dice.randrange(1, 20))]
    elif kind == "broken":
        parts = (dice.choice(BROKEN), text_of(dice), dice.choice(BROKEN))
        ids = _pieces(dice, tokens, "".join(dice.sample(parts, dice.randrange(1, 4))))
    else:
        ids = subject.write(_action(dice), TOOLS)
        if kind == "cut":
            ids = _pieces(dice, tokens, subject.decode(ids))
    return ids if ids and ids[-1] in stops else [*ids, dice.choice(stops)]


def _action(dice: random.Random) -> Message:
    message = dice.choice(
        (
            say(text_of(dice)),
            call("echo", text=text_of(dice)),
            call("add", a=dice.randrange(-99, 99), b=dice.randrange(99)),
        )
    )
    # No two thoughts alike, so that one that is found was not something else.
    thought = f"so {dice.randrange(10**9)} {text_of(dice)}".strip()
    return (
        message
        if dice.random() < 0.7
        else Message(message.role, message.content, thought, message.tool_calls)
    )


def _pieces(dice: random.Random, tokens, text: str) -> list[int]:
    """The tokens of `text`, cut into parts that are encoded apart: seldom the canonical ones."""
    bounds = sorted({0, len(text), *(dice.randrange(len(text) + 1) for _ in range(4))})
    return [
        token for a, b in pairwise(bounds) for token in tokens.encode(text[a:b], add_special_tokens=False)
    ]
