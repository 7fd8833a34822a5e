"""Request bodies of the server: parsing, and validation with one-sentence errors."""

from __future__ import annotations

import asyncio
import re
import reprlib
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Literal, NamedTuple, TypeAlias, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from agentrl.engine.sglang.wire import UNSET_VERSION
from agentrl.tools.json_text import encodable
from agentrl.types import JSON, ExpertLayers
from agentrl.types.seams import MemoryTag, Sampling

MAX_COMPLETIONS = 1024
MAX_STOPS = 64
MAX_STOP_CHARS = 256
MAX_RID_CHARS = 256
MAX_KEY_CHARS = 256
MAX_TEMPERATURE = 1000.0
GREEDY_BELOW = 1e-6
_ALL_TOKENS = 1 << 30
SEEDS = 2**63
_ENCODED_INLINE_CHARS = 4096
_UNION_MEMBER = re.compile(r"_.*|list\[.*|(constrained-)?(str|int|bool)")

_T = TypeVar("_T")
# The first invalid entry ends the validation: an error for each of a million entries takes seconds.
_Flat: TypeAlias = Annotated[list[_T], Field(fail_fast=True)]
_Each: TypeAlias = Annotated[list[_T], Field(max_length=MAX_COMPLETIONS, fail_fast=True)]
_Stops: TypeAlias = Annotated[list[_T], Field(max_length=MAX_STOPS, fail_fast=True)]
_Int32: TypeAlias = Annotated[int, Field(ge=-(2**31), lt=2**31)]
_Key: TypeAlias = Annotated[str, Field(max_length=MAX_KEY_CHARS)]
_Rid: TypeAlias = Annotated[str, Field(max_length=MAX_RID_CHARS)]
_Stop: TypeAlias = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]
_NEUTRAL: dict[str, tuple[JSON, ...]] = {
    "min_p": (0,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "min_new_tokens": (0,),
    "ignore_eos": (False,),
    "spaces_between_special_tokens": (True, False),
}
"""Sampling parameters of SGLang that this server does not support, and the values that disable them."""
_UNSUPPORTED = (
    *("input_embeds", "image_data", "audio_data", "video_data", "lora_path"),
    *("custom_logit_processor", "top_logprobs_num", "token_ids_logprob", "return_hidden_states"),
)

_REMEDIES = {
    "top_logprobs_num": "leave it out. Where it came with `return_kept_ids`, a router has dropped that: send "
    "requests to the server itself, or train with replay_sampling_mask = false"
}


class RefusedError(Exception):
    """An invalid or unsupported request; the message is for the client. code: in OpenAI's words, if any."""

    def __init__(self, sentence: str, code: str | None = None) -> None:
        super().__init__(sentence)
        self.code = code


def sentence_of(error: Exception) -> str:
    """A reason of a renderer as one sentence in one line."""
    line = " ".join(str(error).split())
    return f"{line[:1].upper()}{line[1:]}" + ("" if line.endswith(".") else ".")


def check_supported(
    fields: Mapping[str, JSON], neutral: Mapping[str, Sequence[JSON]], ignored: Collection[str] = ()
) -> None:
    """Refuse fields that would change a reply, and that no one reads.

    neutral: by name, the values that change nothing, beside none. ignored: names that never do.

    Raises:
        RefusedError: by the name of the first one.
    """
    for name, value in fields.items():
        if value is not None and name not in ignored and value not in neutral.get(name, ()):
            raise RefusedError(
                f"This server does not do `{encodable(name):.40}` = {reprlib.repr(value)}; leave it out.",
                "unsupported_parameter",
            )


class TextCodec(NamedTuple):
    """The tokenizer as functions. decode: from token ids, and whether to skip special tokens.

    max_token_chars: the length of the longest token's text (characters).
    """

    encode: Callable[[str], list[int]]
    decode: Callable[[Sequence[int], bool], str]
    max_token_chars: int


class RequestLimits(NamedTuple):
    """What the model takes. max_context_len: of prompt and completion together (tokens).

    layers: those whose experts can be returned; None = there are none.
    """

    vocab_size: int
    max_context_len: int
    layers: ExpertLayers | None = None


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """One completion of a request.

    rid: its id. salt: requests with another one do not use its cached prefix. logprobs: the reply holds them.
    keep_special, keep_stop: the reply's text includes special tokens, and the stop string.
    score_from: the reply also holds the logprobs of the prompt's tokens after this one; None = of none.
    """

    rid: str
    salt: str
    prompt_ids: tuple[int, ...]
    sampling: Sampling
    logprobs: bool
    keep_special: bool
    keep_stop: bool
    score_from: int | None = None


@dataclass(frozen=True, slots=True)
class CompletionBatch:
    """All completions of one HTTP request. single: its reply is one object, not a list."""

    requests: tuple[CompletionRequest, ...]
    single: bool
    stream: bool


class _Body(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True, extra="ignore")


class _Rules(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True, extra="allow")

    max_new_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    temperature: Annotated[float, Field(ge=0, le=MAX_TEMPERATURE)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    stop: _Stop | _Stops[_Stop] | None = None
    stop_token_ids: _Stops[_Int32] | None = None
    sampling_seed: Annotated[int, Field(ge=0, lt=2**64)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_COMPLETIONS)] | None = None
    skip_special_tokens: bool | None = None
    no_stop_trim: bool | None = None


class _RoutedFrom(_Body):
    """What asks for experts where a router passes on no field of their own."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    routed_experts_start_len: _Int32


class _Generate(_Body):
    model_config = ConfigDict(frozen=True, strict=True, extra="allow")

    input_ids: _Flat[_Int32] | _Each[_Flat[_Int32]] | None = None
    text: str | _Each[str] | None = None
    rid: _Rid | _Each[_Rid] | None = None
    extra_key: _Key | _Each[_Key] | None = None
    sampling_params: _Rules | _Each[_Rules] | None = None
    return_logprob: bool | _Each[bool] | None = None
    logprob_start_len: _Int32 | _Each[_Int32] | None = None
    return_kept_ids: bool | _Each[bool] | None = None
    return_routed_experts: bool | None = None
    routed_experts_start_len: _Int32 = 0
    session_params: _RoutedFrom | None = None
    stream: bool = False

    @property
    def experts_from(self) -> int | None:
        """The first token whose experts are asked for; None = those of none are."""
        if self.session_params is not None:
            return self.session_params.routed_experts_start_len
        return self.routed_experts_start_len if self.return_routed_experts else None


class AbortRequest(_Body):
    """A request to end others: that of a rid, with its copies, or all."""

    rid: _Rid = ""
    abort_all: bool = False

    def begins(self, rid: str) -> bool:
        """Whether `rid` begins with the rid."""
        return rid.startswith(self.rid)

    def names(self, rid: str) -> bool:
        """Whether `rid` is the rid, or that of a copy: with `n` copies they are RID_0, RID_1, ..."""
        number = rid.removeprefix(f"{self.rid}_")
        return rid == self.rid or (number != rid and number.isdigit())


class Pause(_Body):
    """A request to stop decoding."""

    mode: Literal["abort", "retract", "in_place"] = "abort"


class MemoryRequest(_Body):
    """A request to release memory, or to allocate it again."""

    tags: list[MemoryTag] = ["weights", "kv_cache"]


class Update(_Body):
    """A request to serve the weights of another directory. weight_version: None = the version stays."""

    model_path: str
    weight_version: str | None = None
    abort_all_requests: bool = False
    load_format: Literal["auto", "safetensors"] | None = None


class Rename(_Body):
    """A request to change the version of the current weights."""

    new_version: str
    abort_all_requests: bool = True


_B = TypeVar("_B", bound=BaseModel)
_V = TypeVar("_V")


def read(model: type[_B], body: bytes | Mapping[str, JSON]) -> _B:
    """Parse a body, or check one that is parsed; an empty one stands for the defaults.

    Raises:
        RefusedError: the body is not JSON, or does not match the schema.
    """
    try:
        if not isinstance(body, bytes):
            return model.model_validate(body)
        return model.model_validate_json(body or b"{}")
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        # Pydantic's path to a value also lists the union members that it tried.
        path = [str(part) for part in first["loc"] if not _UNION_MEMBER.fullmatch(str(part))]
        where = ".".join(path) or "the body"
        raise RefusedError(f"`{where}` does not fit: {first['msg'][:1].lower()}{first['msg'][1:]}.") from None


async def read_generate(body: bytes, codec: TextCodec, limits: RequestLimits) -> CompletionBatch:
    """Parse a body of /generate. Long texts are encoded in a thread.

    Raises:
        RefusedError: the body is invalid, exceeds a bound, or uses an unsupported feature.
    """
    parsed = read(_Generate, body)
    extra = parsed.model_extra or {}
    # The kept ids are what a client of both servers asks for, so SGLang's means to them does no harm.
    replaced = {"top_logprobs_num"} if parsed.return_kept_ids else set()
    for name in set(_UNSUPPORTED) - replaced:
        if extra.get(name) not in (None, 0, False, "", []):
            raise RefusedError(f"This server does not do `{name}`; {_REMEDIES.get(name, 'leave it out')}.")
    prompts, single = await _prompts(parsed, codec, limits)
    rules = _each("sampling_params", parsed.sampling_params or _Rules(), len(prompts))
    if len({rule.n or 1 for rule in rules}) > 1:
        raise RefusedError("`n` must be the same for all prompts of a request.")
    n = rules[0].n or 1
    if len(prompts) * n > MAX_COMPLETIONS:
        raise RefusedError(f"A request asks for at most {MAX_COMPLETIONS} completions; send several.")
    rids = _rids(parsed.rid, len(prompts), n)
    salts = _each("extra_key", parsed.extra_key or "", len(prompts))
    logprobs = _each("return_logprob", parsed.return_logprob or False, len(prompts))
    keeps = _each("return_kept_ids", parsed.return_kept_ids or False, len(prompts))
    layers = _layers(parsed, limits, prompts)
    starts = _each("logprob_start_len", _start(parsed), len(prompts))
    scores_from = [_score_from(start, prompt) for start, prompt in zip(starts, prompts, strict=True)]
    completions = [
        CompletionRequest(
            rids[number * n + copy],
            salts[number],
            prompt,
            replace(
                _sampling(rule, copy, limits),
                return_kept_ids=keeps[number],
                return_routed_experts=layers,
                routed_experts_start_len=parsed.experts_from or 0,
            ),
            logprobs[number],
            rule.skip_special_tokens is False,
            bool(rule.no_stop_trim),
            scores_from[number],
        )
        for number, (prompt, rule) in enumerate(zip(prompts, rules, strict=True))
        for copy in range(n)
    ]
    return CompletionBatch(tuple(completions), single and n == 1, parsed.stream)


def _layers(
    parsed: _Generate, limits: RequestLimits, prompts: Sequence[tuple[int, ...]]
) -> ExpertLayers | None:
    """The layers whose experts are asked for."""
    if parsed.experts_from is None:
        return None
    if limits.layers is None:
        raise RefusedError("This model has no experts to return; leave `return_routed_experts` out.")
    if not 0 <= parsed.experts_from <= min(map(len, prompts)):
        raise RefusedError("`routed_experts_start_len` is a place in the prompt, from 0 to its length.")
    return limits.layers


def read_version(weight_version: str | None, current: int) -> int:
    """The number of a weight_version. current: the current version, for None.

    Raises:
        RefusedError: it is no whole number.
    """
    if weight_version is None:
        return current
    if weight_version == UNSET_VERSION:
        return 0
    if not (weight_version.isascii() and weight_version.isdigit() and len(weight_version) < 10):
        raise RefusedError(f"`weight_version` is a whole number here, not {weight_version[:40]!r}.")
    return int(weight_version)


async def _prompts(
    parsed: _Generate, codec: TextCodec, limits: RequestLimits
) -> tuple[list[tuple[int, ...]], bool]:
    if (parsed.input_ids is None) == (parsed.text is None):
        raise RefusedError("A request has either `input_ids` or `text`; give it one of them.")
    if parsed.text is not None:
        single = isinstance(parsed.text, str)
        texts = [parsed.text] if isinstance(parsed.text, str) else parsed.text
        prompts = await _encoded(texts, codec, limits)
    else:
        ids = parsed.input_ids or []
        nested = [tuple(entry) for entry in ids if isinstance(entry, list)]
        single = not nested
        prompts = nested or [tuple(entry for entry in ids if isinstance(entry, int))]
    if not prompts or not all(prompts):
        raise RefusedError("A prompt has at least one token; this request has one without.")
    if (longest := max(map(len, prompts))) >= limits.max_context_len:
        raise RefusedError(
            f"A prompt has {longest:,} tokens; with its completion it may have {limits.max_context_len:,}."
        )
    return prompts, single


async def _encoded(texts: list[str], codec: TextCodec, limits: RequestLimits) -> list[tuple[int, ...]]:
    """The tokens of texts. One that cannot fit is refused by its length, before it is encoded."""
    max_chars = limits.max_context_len * codec.max_token_chars
    if (longest := max(map(len, texts), default=0)) > max_chars:
        raise RefusedError(
            f"A text has {longest:,} characters; no text of more than {max_chars:,} fits the "
            f"{limits.max_context_len:,} tokens of a request."
        )
    if sum(map(len, texts)) <= _ENCODED_INLINE_CHARS:
        return [tuple(codec.encode(text)) for text in texts]
    return await asyncio.to_thread(lambda: [tuple(codec.encode(text)) for text in texts])


def _start(parsed: _Generate) -> int | list[int]:
    return -1 if parsed.logprob_start_len is None or not parsed.return_logprob else parsed.logprob_start_len


def _score_from(start: int, prompt: tuple[int, ...]) -> int | None:
    if not -1 <= start <= len(prompt):
        raise RefusedError(
            f"`logprob_start_len` is {start}, and the prompt has {len(prompt)} tokens; give a position in "
            "it, or -1 for no logprobs of the prompt."
        )
    return None if start in (-1, len(prompt)) else start


def _rids(rid: str | list[str] | None, num_prompts: int, n: int) -> list[str]:
    if isinstance(rid, str) and num_prompts * n > 1:
        return [f"{rid}_{number}" for number in range(num_prompts * n)]
    if n > 1 or rid is None:
        return [uuid.uuid4().hex for _ in range(num_prompts * n)]
    rids = _each("rid", rid, num_prompts)
    if len(set(rids)) < len(rids):
        raise RefusedError("The `rid`s of a request must differ.")
    return rids


def _each(name: str, value: _V | list[_V], count: int) -> list[_V]:
    """A value per prompt, from a list or from one value for all."""
    if not isinstance(value, list):
        return [value] * count
    if len(value) != count:
        raise RefusedError(f"`{name}` has {len(value)} entries for {count} prompts; give each its own.")
    return value


def _sampling(rule: _Rules, copy: int, limits: RequestLimits) -> Sampling:
    check_supported(rule.model_extra or {}, _NEUTRAL)
    stops = (rule.stop,) if isinstance(rule.stop, str) else tuple(rule.stop or ())
    stop_ids = tuple(rule.stop_token_ids or ())
    if outside := [token for token in stop_ids if not 0 <= token < limits.vocab_size]:
        raise RefusedError(
            f"`stop_token_ids` has {outside[0]}; the vocabulary is 0 to {limits.vocab_size - 1}."
        )
    temperature = 1.0 if rule.temperature is None else rule.temperature
    top_k = rule.top_k or 0
    return Sampling(
        max_new_tokens=128 if rule.max_new_tokens is None else rule.max_new_tokens,
        temperature=0.0 if temperature < GREEDY_BELOW else temperature,
        top_p=1.0 if rule.top_p is None else rule.top_p,
        top_k=0 if top_k < 0 or top_k >= _ALL_TOKENS else top_k,
        stop=stops,
        stop_token_ids=stop_ids,
        # The copies of one prompt are different completions.
        seed=None if rule.sampling_seed is None else (rule.sampling_seed + copy) % SEEDS,
    )
