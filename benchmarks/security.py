"""What untrusted text and servers cost: the longest hold of the event loop, bounds, sandboxed calls.

holds      for every chat family and dialect, a frozen list of bad texts is parsed as a sampled turn, while a
           task of the loop wakes up every 10 ms; its greatest delay is the hold: what is above 20 ms is tried
           five times, and the least counts
ordinary   a turn of a sentence and a call, through the bounds and by the parser alone
floods     what hostile servers send (benchmarks/floods.py), in the same loop
python     `print(1+1)` of 64 callers, and of 60 arrivals a second (benchmarks/python.py)
"""

from __future__ import annotations

import asyncio
import math
import re
import statistics
from collections.abc import AsyncIterator, Iterator
from dataclasses import asdict, dataclass, field

from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from agentrl import Message, Tags, ToolCall, UserError
from agentrl.rendering.bounded import TokenRenderer
from agentrl.rendering.chat import FamilyRenderer, families
from agentrl.rendering.inline import InlineRenderer
from agentrl.rendering.template import TemplateRenderer
from agentrl.run.stages import LagMeter
from agentrl.tools import release_shared
from agentrl.types import JSON
from agentrl.types.seams import ToolSchema
from benchmarks.compare import timed
from benchmarks.floods import holds_of_floods
from benchmarks.machine import machine
from benchmarks.python import CLOSED, bench_python

INLINE, TEMPLATE = "inline", "template"
_TRIES, _SHORT_S = 5, 0.02
_INTEGER: dict[str, JSON] = {"type": "integer"}
_ADD = ToolSchema("add", "Add.", {"type": "object", "properties": {"a": _INTEGER, "b": _INTEGER}})
_VALUE = 1234567
_CALL = Message("assistant", "I add both.", tool_calls=(ToolCall("add", {"a": _VALUE, "b": 30}),))
_QUOTED = re.compile(r"'([^']+)'")
# Calls as JSON in tags, as Hermes and Qwen write them.
_CHAT_TEMPLATE = """{%- if tools -%}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}{% endfor %}<|im_end|>
{% endif -%}{%- for m in messages -%}<|im_start|>{{ m.role }}
{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>
{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endfor -%}{%- if add_generation_prompt -%}<|im_start|>assistant
{% endif -%}"""
_CHATML = ("<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>")


@dataclass(frozen=True, slots=True)
class Security:
    """The workload. Frozen.

    formats: chat families and dialects. sizes: characters of the bad texts. turns, rounds: ordinary ones in a
    run, and runs, of which the fastest counts. floods: whether hostile servers are measured, too.
    """

    formats: tuple[str, ...] = field(default_factory=lambda: (INLINE, TEMPLATE, *families()))
    sizes: tuple[int, ...] = (300, 3_000, 16_000, 56_000, 200_000)
    turns: int = 50
    rounds: int = 60
    repeats: int = 5
    floods: bool = True


def bench_security(settings: Security | None = None, *, with_python: bool = True) -> dict[str, JSON]:
    """Run all sections sequentially.

    Returns:
        summary: the longest hold (ms) and its text, the median and the greatest price of the bounds (ratio of
        the times to parse a turn; microseconds), calls a second, p99 in milliseconds. holds_ms, ordinary: by
        format. floods_ms: by kind. python: see `bench_python`. settings: the workload and the machine.
    """
    settings = settings or Security()
    holds, ordinary = asyncio.run(_measured(settings))
    floods = asyncio.run(holds_of_floods()) if settings.floods else {}
    worst = max(holds, key=lambda name: holds[name].hold_ms)
    ratios = [price["ratio"] for price in ordinary.values()]
    added_us = [price["added_us"] for price in ordinary.values()]
    summary: dict[str, JSON] = {
        "longest_hold_ms": holds[worst].hold_ms,
        "longest_hold": f"{worst}: {holds[worst].text}",
        "longest_flood_ms": max(floods.values(), default=0.0),
        "longest_flood": max(floods, key=lambda name: floods[name], default=""),
        "ordinary_turn_ratio": statistics.median(ratios),
        "ordinary_turn_ratio_worst": max(ratios),
        "ordinary_turn_added_us": statistics.median(added_us),
        "ordinary_turn_added_us_worst": max(added_us),
    }
    result: dict[str, JSON] = {
        "holds_ms": {name: asdict(hold) for name, hold in holds.items()},
        "floods_ms": dict(floods),
        "ordinary": {name: dict(price) for name, price in ordinary.items()},
        "settings": {**asdict(settings), "formats": [*settings.formats], "sizes": [*settings.sizes]},
    }
    if with_python:
        python = bench_python(closed=CLOSED[:1], repeats=settings.repeats)
        summary["python"] = python["summary"]
        result["python"] = python
    return {"summary": summary, **result, "machine": machine()}


@dataclass(frozen=True, slots=True)
class Hold:
    """The longest hold of the event loop by a text (ms), and that text: its kind and its length."""

    hold_ms: float
    text: str


async def _measured(settings: Security) -> tuple[dict[str, Hold], dict[str, dict[str, float]]]:
    holds: dict[str, Hold] = {}
    ordinary: dict[str, dict[str, float]] = {}
    for name in settings.formats:
        subject = Subject.of(name)
        ordinary[name] = await _price(subject, settings)
        holds[name] = max([hold async for hold in _holds(subject, settings)], key=lambda hold: hold.hold_ms)
        await release_shared()
    return holds, ordinary


@dataclass(frozen=True, slots=True)
class Subject:
    """A renderer with its tokenizer. form: a turn with a call, as the format writes it, or empty."""

    renderer: TokenRenderer
    tokenizer: PreTrainedTokenizerFast
    form: str

    @classmethod
    def of(cls, name: str) -> Subject:
        """That of a chat family or a dialect, over a tokenizer of bytes with the markers of the format."""
        if name == INLINE:
            tokenizer = _tokenizer(())
            renderer: TokenRenderer = InlineRenderer(tokenizer, Tags())
        elif name == TEMPLATE:
            tokenizer = _tokenizer(_CHATML, _CHAT_TEMPLATE)
            renderer = TemplateRenderer(tokenizer)
        else:
            tokenizer = _tokenizer(_markers(name))
            renderer = FamilyRenderer(tokenizer, name)
        try:
            form = renderer.decode(renderer.write(_CALL, (_ADD,)))
        except (UserError, ValueError):
            form = ""
        return cls(renderer, tokenizer, form)

    def ids(self, text: str) -> list[int]:
        """The tokens of a text."""
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    async def parse(self, ids: list[int]) -> Message:
        """The turn, as an episode parses it."""
        return await self.renderer.bounded.parse(ids, (_ADD,))

    def bad_texts(self, size: int) -> Iterator[tuple[str, str]]:
        """Texts of about `size` characters, by their kind. Frozen."""
        head, _, tail = self.form.partition(str(_VALUE))
        for name, filler in (("line ends", "\n"), ("blanks", " "), ("digits", "9"), ("braces", '{"a":')):
            filled = filler * (size // len(filler))
            yield f"{name} in a call without end", head + filled
            yield f"{name} in a call", head + filled + tail
        markers = [str(token) for token in self.tokenizer.get_added_vocab()]
        for part in dict.fromkeys((self.form, head, tail, head[: len(head) // 2], "<", *markers)):
            if part:
                yield f"{part[:40]!r} again and again", part * (size // len(part) + 1)
        for marker in markers:
            yield f"{marker!r} and line ends", marker + "\n" * size


async def _holds(subject: Subject, settings: Security) -> AsyncIterator[Hold]:
    async with LagMeter() as meter:
        for size in settings.sizes:
            for kind, text in subject.bad_texts(size):
                ids = subject.ids(text)
                # What a text does to the loop it does every time; what the machine does passes.
                tries, hold_s = 0, math.inf
                while hold_s >= _SHORT_S and tries < _TRIES:
                    hold_s, tries = min(hold_s, await _hold_s(subject, ids, meter)), tries + 1
                yield Hold(1e3 * hold_s, f"{kind}, {len(text):,} characters")


async def _hold_s(subject: Subject, ids: list[int], meter: LagMeter) -> float:
    await asyncio.sleep(0.02)
    meter.take()
    await subject.parse(ids)
    # The meter wakes up first, even if it is late.
    await asyncio.sleep(0.02)
    return meter.take()


async def _price(subject: Subject, settings: Security) -> dict[str, float]:
    ids = subject.ids(subject.form or "I add both.")

    async def bounded() -> None:
        for _ in range(settings.turns):
            await subject.parse(ids)

    async def bare() -> None:
        for _ in range(settings.turns):
            subject.renderer.parse(ids, (_ADD,))

    runs = await timed({"bounded": bounded, "bare": bare}, repeats=settings.rounds)
    us = {side: 1e6 * min(run.cpu_s for run in runs[side]) / settings.turns for side in runs}
    added_us = us["bounded"] - us["bare"]
    ratio = us["bounded"] / us["bare"]
    return {"bounded_us": us["bounded"], "bare_us": us["bare"], "added_us": added_us, "ratio": ratio}


def _tokenizer(markers: tuple[str, ...], template: str | None = None) -> PreTrainedTokenizerFast:
    """A tokenizer of bytes, with markers as special tokens."""
    bytes_ = sorted(pre_tokenizers.ByteLevel.alphabet())
    built = Tokenizer(BPE({byte: index for index, byte in enumerate(bytes_)}, []))
    built.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    built.decoder = decoders.ByteLevel()
    built.add_special_tokens([AddedToken(marker, normalized=False, special=True) for marker in markers])
    return PreTrainedTokenizerFast(
        tokenizer_object=built,
        eos_token=markers[-1] if markers else None,
        chat_template=template,
        clean_up_tokenization_spaces=False,
    )


def _markers(family: str) -> tuple[str, ...]:
    """The special tokens that a family needs: it refuses a tokenizer without one, and names that.

    Raises:
        UserError: it refuses the tokenizer for another reason.
    """
    markers: list[str] = []
    while True:
        try:
            FamilyRenderer(_tokenizer(tuple(markers)), family)
        except UserError as error:
            missing = _QUOTED.search(str(error))
            if missing is None or missing[1] in markers:
                raise
            markers.append(missing[1])
        else:
            return tuple(markers)
