"""A client of random conversations, which knows what each of its requests continues; and a policy for it."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from dataclasses import dataclass, field, replace

from agentrl import Message, ToolCall, call, say
from agentrl.envs.gateway.recording import EpisodeRecording, ModelRequest
from agentrl.types import Finish, Restart
from agentrl.types.seams import Seen, ToolSchema
from tests.rendering.subjects import renderer
from tests.worlds import completion

FORMS = ("qwen3", "template, tagged calls")
FIELDS = {"text": {"type": "string"}, "times": {"type": "integer", "default": 1}}
TOOLS = (ToolSchema("echo", "Say it.", {"type": "object", "properties": FIELDS, "required": ["text"]}),)
OTHERS = (*TOOLS, ToolSchema("wait", "Wait.", {"type": "object", "properties": {}}))
WORDS = ["Kalor", "12 and 30", " is 42 ", "Tirak\n", "born <|im_end|>", "é", "OK"]


class Babbler:
    """A policy that says or calls anything, in any tokens. asked: each prompt, and what it has sampled.

    is_late: it samples nothing more, as after a deadline.
    """

    version = 3
    is_late = False

    def __init__(self, words, rng):
        self._words, self._rng = words, rng
        self.asked: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
        self.sessions = {}

    async def generate(self, prompt_ids, sampling, *, session):
        if self.is_late:
            return completion([], version=self.version, finish=Finish.LENGTH)
        # As every engine: a session runs one request at a time.
        assert not self.sessions.get(session), f"{session} is busy"
        self.sessions[session] = True
        for _ in range(self._rng.randrange(3)):
            await asyncio.sleep(0)
        self.sessions[session] = False
        ids = self._turn()[: sampling.max_new_tokens]
        self.asked.append((tuple(prompt_ids), tuple(ids)))
        return completion(ids, version=self.version)

    async def close_session(self, session):
        self.sessions.pop(session, None)

    def _turn(self):
        rng, words = self._rng, self._words
        kind = rng.randrange(4)
        if kind == 0:
            # Equal messages, in tokens that may differ.
            return words.write(say(" OK" if rng.random() < 0.5 else "OK"), TOOLS)
        if kind == 1:
            return words.write(say(" ".join(rng.choices(WORDS[:4], k=3))), TOOLS)
        calls = [call("echo", text=rng.choice(WORDS[:4])).tool_calls[0] for _ in range(rng.randint(1, 2))]
        ids = words.write(Message("assistant", rng.choice(["", "So."]), tool_calls=tuple(calls)), TOOLS)
        text = words.decode(ids[:-1])
        cut = rng.randrange(len(text) + 1)
        encode = words.tokenizer.encode
        parts = [encode(part, add_special_tokens=False) for part in (text[:cut], text[cut:])]
        # Cut elsewhere, a call is seldom of the tokens that its text would be encoded to.
        return [*parts[0], *parts[1], ids[-1]] if rng.random() < 0.5 else ids


@dataclass
class Held:
    """A reply, as its client holds the conversation up to it. ours: the same as it was parsed."""

    theirs: tuple[Message, ...]
    ours: tuple[Message, ...]
    tools: tuple[ToolSchema, ...]
    prompt: tuple[int, ...]
    ids: tuple[int, ...]
    new: tuple[Message, ...]
    before: Held | None


@dataclass
class Client:
    """Asks as clients do. expected: for each request, the prompts that it may have been sampled after."""

    recording: EpisodeRecording
    policy: Babbler
    words: object
    rng: random.Random
    held: list[Held] = field(default_factory=list)
    kinds: Counter[str] = field(default_factory=Counter)
    changed: Counter[str] = field(default_factory=Counter)

    async def run(self, num_requests):
        while num_requests > 0:
            together = self.rng.choice((1, 1, 1, 3))
            await asyncio.gather(*(self.ask() for _ in range(together)))
            num_requests -= together

    async def ask(self):
        kind = self.rng.choice(("begin", "again", "continue", "continue", "continue", "compact", "tools"))
        if not self.held or kind == "begin":
            await self._answered((Message("system", "Be brief."), self._question()), TOOLS, None)
            return
        held = self.rng.choice(self.held)
        self.kinds[kind] += 1
        if kind == "again":
            await self._answered(held.new, held.tools, held.before)
        elif kind == "compact":
            summary = (Message("user", f"Before: {len(held.theirs)} {self.rng.random()}"),)
            await self._answered((*held.theirs[:1], *summary), held.tools, None)
        else:
            tools = OTHERS if kind == "tools" else held.tools
            new = tuple(self._next(held.theirs[-1]))
            await self._answered(new, tools, held)

    def _question(self):
        return Message("user", f"{self.rng.choice(WORDS)} {self.rng.randrange(3)}?")

    def _next(self, last):
        if not last.tool_calls:
            yield self._question()
        for each in last.tool_calls:
            yield Message("tool", self.rng.choice(WORDS), tool_call_id=each.id, name=each.name)

    async def _answered(self, new, tools, held):
        n = self.rng.choice((1, 1, 2))
        messages = (*(() if held is None else held.theirs), *new)
        num_before = len(self.policy.asked)
        answers = await self.recording.answers(ModelRequest(messages, tools, n=n))
        mine = self.policy.asked[num_before:]
        prompts = {prompt for prompt, _ in mine}
        if held is not None:
            expected = {
                self._prompt(own, tuple(_renamed(m, held, own) for m in new), tools)
                for own in self._twins(held)
            }
            assert prompts & expected, "it is not sampled after what it continues"
        for answered in answers:
            ids = tuple(answered.completion.token_ids.tolist())
            prompt = next(p for p, sampled in mine if sampled == ids and (held is None or p in expected))
            self._hold(new, held, tools, (prompt, ids), answered)

    def _twins(self, held):
        """Replies that the client cannot tell from this one."""
        return [own for own in self.held if own.theirs == held.theirs or _plain(own) == _plain(held)]

    def _prompt(self, held, new, tools):
        seen = Seen(held.ours, held.tools, held.prompt, held.ids)
        added = self.words.extend(seen, new, tools)
        if isinstance(added, Restart):
            return tuple(self.words.render((*held.ours, *new), tools))
        return (*held.prompt, *held.ids, *added)

    def _hold(self, new, held, tools, sampled, answered):
        prompt, ids = sampled
        messages = (*(() if held is None else held.theirs), *new)
        action = self.words.parse(ids, tools, prompt_ids=prompt)
        ours = (*(() if held is None else held.ours), *(_renamed(m, held, held) for m in new))
        written, kinds = _written(answered.turn, self.rng)
        self.changed.update(kinds)
        self.held.append(Held((*messages, written), (*ours, action), tools, prompt, ids, new, held))


def _plain(held):
    """A conversation in a form of the test's own, in which messages that are the same are equal."""
    numbers, plain = {}, []
    for message in held.theirs:
        for each in message.tool_calls:
            numbers[each.id] = len(numbers)
        calls = [
            (c.name, json.dumps(_without_default(c.arguments), sort_keys=True)) for c in message.tool_calls
        ]
        plain.append((message.role, message.text.strip(), calls, numbers.get(message.tool_call_id)))
    return plain, [tool.name for tool in held.tools]


def _without_default(arguments):
    return {name: value for name, value in arguments.items() if (name, value) != ("times", 1)}


def _renamed(message, held, own):
    """A result with the id of its call as that was parsed; `own`: of a twin."""
    if message.tool_call_id is None or held is None:
        return message
    place = [each.id for each in held.theirs[-1].tool_calls].index(message.tool_call_id)
    readable = [each for each in own.ours[-1].tool_calls if each.arguments is not None]
    return replace(message, tool_call_id=readable[place].id)


def _written(turn, rng):
    """A reply as its client writes it again, and what it has changed."""
    kinds, content, calls = set(), turn.content, []
    if rng.random() < 0.5 and content:
        kinds, content = kinds | {"white_space"}, f"{content} \n"
    for each in turn.calls:
        arguments, id = dict(each.arguments), each.id
        raw = json.dumps(arguments, ensure_ascii=False)
        if rng.random() < 0.3:
            arguments = {"times": 1, **arguments}
            kinds, raw = kinds | {"defaults"}, json.dumps(arguments)
        elif rng.random() < 0.3:
            kinds, raw = kinds | {"arguments"}, json.dumps(arguments, indent=1)
        if rng.random() < 0.3:
            kinds, id = kinds | {"ids"}, f"own_{each.id}"
        calls.append(ToolCall(each.name, arguments, raw, id))
    reasoning = turn.reasoning or None
    if reasoning and rng.random() < 0.5:
        kinds, reasoning = kinds | {"reasoning"}, None
    return Message("assistant", content, reasoning, tuple(calls)), kinds


def words_of(form):
    """The renderer of a format."""
    return renderer(form, "byte-level")
