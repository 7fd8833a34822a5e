"""A teacher behind HTTP: servers of SGLang, or of `agentrl serve`, that score the policy's own tokens.

    POST /generate   {"input_ids": [1, 10, 20, 30], "return_logprob": true, "logprob_start_len": 1,
                      "sampling_params": {"max_new_tokens": 0}}
    200              {"meta_info": {"input_token_logprobs": [[null, 10, null], [-5.15, 20, null], ...]}}

As observed on SGLang 0.5.15: the list begins with the token at logprob_start_len, whose own logprob is null,
and the sampling temperature does not act on it: logprobs of prompts are those of temperature 1. A token
outside of the server's vocabulary ends a server on the CPU, so tokens are sent only after its tokenizer was
compared with the policy's.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated

import httpx2
import numpy as np
from pydantic import FailFast, Field

from agentrl.algorithms.distillation import first_sampled, teachers_row
from agentrl.engine.sglang import wire
from agentrl.errors import ConfigError, EngineError, TeacherError, ToolError
from agentrl.http.guarded import AllowedAddresses, bearer
from agentrl.http.requests import BUSY, Backoff, Retrying, StatusError, body_of
from agentrl.runtime.stage import all_of
from agentrl.types import JSON, FloatArray, IntArray, Sample
from agentrl.types.seams import Trainer

_CONNECT_TIMEOUT_S = 5.0
_CHECK_TIMEOUT_S = 30.0
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.2, 10.0
_CHECK_ATTEMPTS, _ATTEMPTS = 3, 1_000_000
_VALUES_OF_TOKEN, _BYTES_OF_TOKEN = 8, 128
_MAX_META_VALUES, _MAX_META_BYTES = 10_000, 1 << 20
# sglang-router answers so where a server has dropped the connection.
_PASSING = BUSY | {500}
_REFUSED = 400


class _Meta(wire.WireModel):
    input_token_logprobs: Annotated[list[tuple[float | None, int, str | None]], FailFast()] = Field(
        default_factory=list
    )
    prompt_tokens: Annotated[int, Field(ge=0)] = 0


class _Reply(wire.WireModel):
    meta_info: _Meta


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedTeacher:
    """Scores by servers of one model.

    urls: of the servers, or of a router; requests take turns among them, and one that fails goes on to the
        next address.
    key_env: the environment variable with their key; None = no key is sent. timeout_s: of one request with
        all its retries (seconds). max_requests: that are in flight (count).

    Raises:
        ConfigError: an address is invalid, or the variable holds no key.
    """

    urls: tuple[str, ...]
    key_env: str | None = None
    timeout_s: float = 600.0
    max_requests: int = 64

    def __post_init__(self) -> None:
        if any("@" in url for url in self.urls):
            raise ConfigError(
                "opd_teacher_url: leave the user name and password out, and give the name of an environment "
                "variable with the key (opd_teacher_key_env)."
            )
        AllowedAddresses(*self.urls)
        self._headers()

    @property
    def uses_trainer(self) -> bool:
        """Whether it has to wait for the trainer: it does not."""
        return False

    async def logprobs(self, samples: Sequence[Sample], trainer: Trainer) -> tuple[FloatArray, ...]:
        """Logprobs of the sampled tokens at temperature 1, [T] for each sample; 0 elsewhere.

        Waits for: the servers. Unblocked by: their replies, `timeout_s`. On cancellation: all requests are
        cancelled.

        Raises:
            TeacherError: a request has failed until `timeout_s`, or was refused; or a sample has another
                temperature.
        """
        del trainer
        for sample in samples:
            if np.any(sample.temperatures[sample.loss_mask] != 1):
                raise TeacherError(
                    f"episode {sample.rollout_id.episode} was sampled at another temperature than 1, and "
                    "servers give logprobs of prompts at temperature 1 only; load the teacher "
                    "(opd_teacher_load), or sample at rollout_temperature = 1."
                )
        places = asyncio.Semaphore(self.max_requests)
        async with self._client() as http:
            return tuple(
                await all_of([self._scored(http, places, n, sample) for n, sample in enumerate(samples)])
            )

    async def check(self, text: str, token_ids: Sequence[int]) -> None:
        """Check every address: it is reachable, takes the key and scores, and has the policy's tokenizer.

        text, token_ids: any text, and the policy's tokens of it. A server without a tokenizer is not asked.

        Raises:
            TeacherError: a server cannot be reached, or refuses.
            ConfigError: it has another tokenizer.
        """
        retrying = Retrying(Backoff(_CHECK_ATTEMPTS, _FIRST_WAIT_S, _LONGEST_WAIT_S))
        errors: list[Exception] = []
        async with self._client() as http:
            for url in self.urls:
                request = _request({"text": text}, 0)
                send = partial(self._sent, http, [url], request, 2 * len(text) + len(token_ids))
                try:
                    async with asyncio.timeout(_CHECK_TIMEOUT_S):
                        body = await retrying(send, errors.append)
                except StatusError as error:
                    if error.status == _REFUSED and "tokenizer" in str(error):
                        continue
                    raise TeacherError(f"opd_teacher_url: {url} {error}; {_remedy(error)}") from error
                except (httpx2.HTTPError, ToolError, ValueError, TimeoutError) as error:
                    raise TeacherError(
                        f"opd_teacher_url: {url} cannot be reached ({_text(error)}); start the teacher's "
                        "server, or mend the address."
                    ) from error
                found = [token for _, token, _ in await asyncio.to_thread(_entries, url, body)]
                if not _contains(found, token_ids):
                    raise ConfigError(
                        f"opd_teacher_url: the server at {url} has another tokenizer than the policy, so it "
                        "cannot score its tokens; serve a model with the same one."
                    )

    async def _scored(
        self, http: httpx2.AsyncClient, places: asyncio.Semaphore, number: int, sample: Sample
    ) -> FloatArray:
        """The logprobs of one sample. number: of it, which says at which address it begins."""
        row, scores = teachers_row(sample), np.zeros(len(sample), dtype=np.float32)
        sampled = np.flatnonzero(row.loss_mask)
        if not len(sampled):
            return scores
        start, end = first_sampled(row), int(sampled[-1]) + 1
        async with places:
            values = await self._values(http, number, row.token_ids[:end], start)
        first = first_sampled(sample)
        scores[first : first + len(values)] = values
        return scores

    async def _values(self, http: httpx2.AsyncClient, number: int, ids: IntArray, start: int) -> FloatArray:
        """The logprobs of `ids[start:]`."""
        at = number % len(self.urls)
        # Each attempt takes the next address.
        urls = [*self.urls[at:], *self.urls[:at]]
        send = partial(self._sent, http, urls, _request({"input_ids": ids.tolist()}, start - 1), len(ids))
        errors: list[Exception] = []
        retrying = Retrying(Backoff(_ATTEMPTS, _FIRST_WAIT_S, _LONGEST_WAIT_S), _is_passing)
        try:
            async with asyncio.timeout(self.timeout_s):
                body = await retrying(send, errors.append)
        except TimeoutError as error:
            last = f"; the last error: {_text(errors[-1])}" if errors else ""
            raise TeacherError(
                f"the teacher at {urls[0]} did not score {len(ids):,} tokens in {self.timeout_s:g} s "
                f"(opd_teacher_timeout_s){last}; see that its server runs, then resume the run."
            ) from error
        except (httpx2.HTTPError, StatusError, ToolError, ValueError) as error:
            raise TeacherError(
                f"the teacher at {urls[0]}: {_text(error)}; {_remedy(error)}, then resume the run."
            ) from error
        entries = await asyncio.to_thread(_entries, urls[0], body)
        scored = [logprob for logprob, _, _ in entries[1:]]
        if not _are_of(ids[start - 1 :], [token for _, token, _ in entries]) or None in scored:
            raise TeacherError(
                f"the teacher at {urls[0]} scored other tokens than it was sent: {len(entries)} of "
                f"{len(ids) - start + 1}; see that its server truncates nothing (context_length), then "
                "resume the run."
            )
        return np.array(scored, dtype=np.float32)

    async def _sent(
        self, http: httpx2.AsyncClient, urls: list[str], content: bytes, num_tokens: int
    ) -> bytes:
        """Send a request to the first address, which then becomes the last."""
        url = urls.pop(0)
        urls.append(url)
        return await body_of(
            http,
            "POST",
            httpx2.URL(f"{url.rstrip('/')}/generate"),
            content,
            max_bytes=_MAX_META_BYTES + _BYTES_OF_TOKEN * num_tokens,
            max_values=_MAX_META_VALUES + _VALUES_OF_TOKEN * num_tokens,
        )

    def _client(self) -> httpx2.AsyncClient:
        http = AllowedAddresses(*self.urls).client(
            timeout_s=None, max_connections=self.max_requests, headers=self._headers()
        )
        http.timeout = httpx2.Timeout(None, connect=_CONNECT_TIMEOUT_S)
        return http

    def _headers(self) -> dict[str, str]:
        return {} if self.key_env is None else bearer(os.environ.get(self.key_env, ""), self.key_env)


def _request(prompt: dict[str, JSON], start: int) -> bytes:
    asked: dict[str, JSON] = {
        "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
        "return_logprob": True,
        "logprob_start_len": start,
    }
    return json.dumps({**prompt, **asked}).encode()


def _entries(url: str, body: bytes) -> list[tuple[float | None, int, str | None]]:
    try:
        return wire.read(_Reply, body, f"the reply of {url}").meta_info.input_token_logprobs
    except EngineError as error:
        raise TeacherError(str(error)) from error


def _are_of(ids: IntArray, found: Sequence[int]) -> bool:
    """Whether a reply is of these tokens. SGLang reports the last token of a vocabulary as 0."""
    return len(found) == len(ids) and all(
        token in (own, 0) for own, token in zip(ids.tolist(), found, strict=True)
    )


def _contains(found: Sequence[int], expected: Sequence[int]) -> bool:
    """Whether the tokens are among those found, which may have special ones before and after them."""
    ids, size = np.asarray(expected, dtype=np.int32), len(expected)
    return any(_are_of(ids, found[at : at + size]) for at in range(len(found) - size + 1))


def _is_passing(error: StatusError) -> bool:
    return error.status in _PASSING


def _remedy(error: Exception) -> str:
    if isinstance(error, StatusError) and error.status in (401, 403):
        return "put its key into the environment variable that opd_teacher_key_env names"
    return "see the server's log"


def _text(error: Exception) -> str:
    return str(error) or type(error).__name__
