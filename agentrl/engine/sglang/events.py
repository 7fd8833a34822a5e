"""A streamed reply: server-sent events with all tokens so far, of which the last one is the reply.

data: {"output_ids": [59], "text": "..", "meta_info": {"finish_reason": null, ..}}
data: {"output_ids": [59, 7], "text": "..", "meta_info": {"finish_reason": {"type": "stop"}, ..}}
data: [DONE]
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pydantic import ValidationError

from agentrl.engine.sglang.wire import PartialReply
from agentrl.errors import EngineUnavailableError

# Parsing a longer one for its tokens alone would hold the event loop.
_MAX_TOLD_BYTES = 1 << 20
_END, _FIELD, _DONE = b"\n\n", b"data:", b"[DONE]"


class ReplyEvents:
    """The chunks of a body -> its last event. tell: is called with the tokens of the reply so far.

    max_bytes: of an event.
    """

    def __init__(self, tell: Callable[[Sequence[int]], None], max_bytes: int) -> None:
        self._tell, self._max_bytes = tell, max_bytes
        self._received = bytearray()
        self._last: bytes | None = None
        self._has_ended = False

    def feed(self, data: bytes) -> None:
        """Add bytes, and tell the tokens of the last event that is complete, unless it is the whole reply.

        Raises:
            ValueError: an event is too long, or is none.
        """
        self._received += data
        end = self._received.rfind(_END)
        if len(self._received) - max(end, 0) > self._max_bytes:
            raise ValueError(f"an event of the reply is longer than {self._max_bytes:,} bytes")
        if end < 0:
            return
        events = bytes(self._received[:end]).split(_END)
        del self._received[: end + len(_END)]
        if not all(event.startswith(_FIELD) for event in events):
            raise ValueError("what came between two events of the reply is none")
        texts = [event.removeprefix(_FIELD).strip() for event in events]
        self._has_ended = self._has_ended or _DONE in texts
        texts = [text for text in texts if text != _DONE]
        if texts:
            self._last = texts[-1]
            if len(self._last) <= _MAX_TOLD_BYTES:
                self._tell_those_of(self._last)

    def _tell_those_of(self, event: bytes) -> None:
        try:
            partial = PartialReply.model_validate_json(event)
        except ValidationError:
            raise ValueError("an event of the reply does not follow the SGLang protocol") from None
        if partial.meta_info.finish_reason is None:
            self._tell(partial.output_ids)

    def whole(self, body: bytes) -> bytes:
        """The reply. body: what came in no chunks, as from a server that does not stream.

        Raises:
            EngineUnavailableError: the stream broke off.
            ValueError: see `feed`.
        """
        if body.startswith(_FIELD):
            self.feed(body)
        if self._last is None:
            return body
        if not self._has_ended:
            raise EngineUnavailableError("the server broke off a stream before the end of its reply.")
        return self._last
