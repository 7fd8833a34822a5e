"""The engine of the run behind slime's `post`: it answers requests as SGLang's `/generate` does."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from typing import NamedTuple
from urllib.parse import urlsplit

import httpx

from agentrl.envs import EpisodeInPlay
from agentrl.errors import StageError
from agentrl.types import JSON, Completion, Finish
from agentrl.types.seams import Tokenizer

HOST, PORT = "policy.invalid", 80
"""`sglang_router_ip` and `sglang_router_port`: nobody listens there, and `post` needs nobody."""
_MAX_REPLY_BYTES = 64 << 20
_SAMPLED_AS = {"temperature": 1.0, "top_p": 1.0, "top_k": -1}
_CHANGES_TOKENS = frozenset(
    {"min_p", "frequency_penalty", "presence_penalty", "repetition_penalty", "min_new_tokens"}
)
_KNOWN = _CHANGES_TOKENS | {
    *("n", "max_new_tokens", "stop", "stop_token_ids", *_SAMPLED_AS),
    *(
        "skip_special_tokens",
        "no_stop_trim",
        "spaces_between_special_tokens",
        "sampling_seed",
        "custom_params",
    ),
}
"""Settings that would sample from another distribution than the one that is trained, unless they are off."""


class _Known(NamedTuple):
    """A text, and the tokens that it was: never to be encoded again."""

    text: str
    ids: list[int]


class EngineOfEpisode:
    """Answers the requests of one episode."""

    def __init__(self, episode: EpisodeInPlay) -> None:
        self._episode = episode
        self._known: list[_Known] = []

    @property
    def tokenizer(self) -> Tokenizer:
        """The run's tokenizer."""
        return self._episode.tokens.tokenizer

    @property
    def sampling_params(self) -> dict[str, object]:
        """How the run samples, by SGLang's names."""
        own = self._episode.tokens.sampling
        return {
            "temperature": own.temperature,
            "top_p": own.top_p,
            "top_k": own.top_k or -1,
            "max_new_tokens": own.max_new_tokens,
            "stop": list(own.stop),
            "stop_token_ids": list(own.stop_token_ids),
            "skip_special_tokens": False,
            "no_stop_trim": True,
            "spaces_between_special_tokens": False,
        }

    def learn(self, text: str, ids: Sequence[int]) -> None:
        """Remember which tokens a text was."""
        self._known.append(_Known(text, list(ids)))

    @property
    def was_aborted(self) -> bool:
        """Whether the run gave up the last request."""
        return self._episode.tokens.was_aborted

    async def sample(self, prompt_ids: Sequence[int], params: Mapping[str, object]) -> Completion:
        """What the policy samples after these tokens.

        Raises:
            StageError: the parameters sample otherwise than the run.
        """
        self._check(params)
        most, stop = params.get("max_new_tokens"), params.get("stop")
        return await self._episode.tokens.sample(
            prompt_ids,
            max_new_tokens=most if isinstance(most, int) else None,
            stop=[stop] if isinstance(stop, str) else [str(text) for text in _list(stop)],
            stop_token_ids=[int(str(token)) for token in _list(params.get("stop_token_ids"))],
        )

    def text_of(self, completion: Completion, params: Mapping[str, object]) -> str:
        """The text that SGLang would return."""
        hides = params.get("skip_special_tokens", True) is not False
        ids, matched = completion.token_ids.tolist(), completion.matched
        trims = completion.finish is Finish.STOP and not params.get("no_stop_trim")
        if trims and isinstance(matched, int) and ids[-1:] == [matched]:
            ids = ids[:-1]
        text = str(self.tokenizer.decode(ids, skip_special_tokens=hides))
        return text.removesuffix(matched) if trims and isinstance(matched, str) else text

    async def reply(self, payload: Mapping[str, object]) -> dict[str, JSON]:
        """What SGLang would answer to `/generate`.

        Raises:
            StageError: the request samples otherwise than the run, or has no prompt.
        """
        params = payload.get("sampling_params")
        params = params if isinstance(params, Mapping) else {}
        prompt_ids, prompt = self.prompt_of(payload)
        completion = await self.sample(prompt_ids, params)
        ids, text = completion.token_ids.tolist(), self.text_of(completion, params)
        if prompt is not None:
            self.learn(prompt + text, [*prompt_ids, *ids])
        return {"text": text, "output_ids": ids, "meta_info": meta_info(completion, len(prompt_ids))}

    def _check(self, params: Mapping[str, object]) -> None:
        own = self.sampling_params
        if strange := [name for name in params if name not in _KNOWN and params[name] not in (None, False)]:
            raise _invalid(f"the request sets {strange[0]}, which has no effect here; leave it out")
        for name, off in _SAMPLED_AS.items():
            if params.get(name, off) != own[name]:
                raise _invalid(
                    f"the request samples with {name} = {params.get(name, off)}, the run with {own[name]}"
                )
        changed = [name for name in _CHANGES_TOKENS if params.get(name) not in (None, 0, 0.0, 1.0)]
        if changed or params.get("n") not in (None, 1):
            raise _invalid(f"the request sets {(changed or ['n'])[0]}, and no run samples so; leave it out")

    def prompt_of(self, payload: Mapping[str, object]) -> tuple[list[int], str | None]:
        """The tokens of a prompt, and its text where it was text.

        Raises:
            StageError: it has none.
        """
        ids, text = payload.get("input_ids"), payload.get("text")
        if isinstance(ids, Sequence) and not isinstance(ids, str):
            return [int(token) for token in ids], None
        if not isinstance(text, str):
            raise _invalid("the request has neither `input_ids` nor `text`")
        fitting = (known for known in self._known if text.startswith(known.text))
        before = max(fitting, key=lambda known: len(known.text), default=_Known("", []))
        added = text[len(before.text) :]
        more = self.tokenizer.encode(added, add_special_tokens=False) if added else []
        return [*before.ids, *more], text


def meta_info(completion: Completion, num_prompt_tokens: int) -> dict[str, JSON]:
    """SGLang's account of a request."""
    reasons: dict[Finish, dict[str, JSON]] = {
        Finish.STOP: {"type": "stop", "matched": completion.matched},
        Finish.LENGTH: {"type": "length", "length": len(completion.token_ids)},
        Finish.ABORT: {"type": "abort", "message": "the run stops this request"},
    }
    pairs = zip(completion.logprobs.tolist(), completion.token_ids.tolist(), strict=True)
    return {
        "finish_reason": reasons[completion.finish],
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": len(completion.token_ids),
        "cached_tokens": completion.cached_tokens,
        "weight_version": str(completion.versions[-1]) if len(completion.versions) else "default",
        "output_token_logprobs": [[logprob, token, None] for logprob, token in pairs],
    }


in_play: ContextVar[EngineOfEpisode] = ContextVar("slime_episode")
"""The episode that a function plays now."""


def engine() -> EngineOfEpisode:
    """That of the episode in play.

    Raises:
        StageError: no function of `generate_of` plays.
    """
    try:
        return in_play.get()
    except LookupError:
        raise _invalid("there is no episode in play: generate_of() calls functions that sample") from None


async def post(
    url: str, payload: Mapping[str, object], max_retries: int = 60, headers: Mapping[str, str] | None = None
) -> JSON:
    """slime's `post`: a request to the router is answered by the policy, any other is sent.

    Raises:
        StageError: as for `EngineOfEpisode.reply`; or the reply is longer than 64 MiB.
        httpx.HTTPError: a server cannot be reached, or refuses.
    """
    del max_retries  # A failed episode is played again.
    parts = urlsplit(url)
    if parts.hostname == HOST:
        if parts.path != "/generate":
            raise _invalid(f"the engine of a run answers /generate, not {parts.path}")
        return dict(await engine().reply(payload))
    async with (
        httpx.AsyncClient(timeout=600.0) as client,
        client.stream("POST", url, json=payload, headers=headers) as response,
    ):
        body = bytearray()
        async for part in response.aiter_bytes():
            body += part
            if len(body) > _MAX_REPLY_BYTES:
                raise _invalid(f"the reply of {parts.hostname} is longer than {_MAX_REPLY_BYTES >> 20} MiB")
        response.raise_for_status()
    reply: JSON = json.loads(body)
    return reply


def _list(value: object) -> Sequence[object]:
    return value if isinstance(value, Sequence) else ()


def _invalid(detail: str) -> StageError:
    return StageError("generate", "invalid", detail)
