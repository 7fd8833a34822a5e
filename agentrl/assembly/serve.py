"""A model directory behind the engine's server."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from transformers import PreTrainedTokenizerBase

from agentrl.assembly.model import use_threads
from agentrl.assembly.policy import check_cache
from agentrl.engine.embedded import EmbeddedEngine
from agentrl.engine.served.app import EngineApp
from agentrl.engine.served.config import ServeSettings, control_key
from agentrl.engine.served.requests import TextCodec
from agentrl.errors import UserError
from agentrl.http.serving import WAITING_CONNECTIONS, RequestChecks, address_of, bound, host_names, serve
from agentrl.rendering.bounded import TokenRenderer
from agentrl.rendering.choice import chat_renderer
from agentrl.types.seams import EpisodeRenderer
from agentrl.weights.hf.source import open_source


def serve_model(directory: str, settings: ServeSettings, *, ready: Callable[[str, int, bool], None]) -> None:
    """Serve a model until SIGINT, SIGTERM or SIGHUP.

    Control requests need the key of the environment variable AGENTRL_CONTROL_KEY; where it is not set, they
    are refused.

    ready: called when the server accepts requests, with the address, the most tokens of a request, and
        whether the model has a chat template, so that it takes messages.

    Raises:
        ConfigError: the key is unfit; the slots take more memory than this machine has.
        ModelLoadError: the directory is missing or broken, or its architecture is not supported.
        UserError: the address cannot be used.
    """
    checks = RequestChecks(host_names(settings.host, settings.allowed_hosts), control_key())
    with bound(settings.host, settings.port) as listener:
        source = open_source(directory)
        check_cache(source.config, settings.max_slots, settings.max_context_len)
        use_threads(source.config, settings.num_threads)
        engine = EmbeddedEngine.from_pretrained(
            directory,
            max_slots=settings.max_slots,
            max_context_len=settings.max_context_len,
            decode=source.decode,
            deterministic=settings.enable_deterministic_inference,
        )
        renderer = chat_of(source.tokenizer)
        codec = codec_of(source.tokenizer)
        app = EngineApp(engine, codec, name=directory, renderer=renderer, checks=checks)
        listener.listen(WAITING_CONNECTIONS)
        ready(address_of(listener), engine.max_context_len, renderer is not None)
        serve(app.app, listener)


def codec_of(tokenizer: PreTrainedTokenizerBase) -> TextCodec:
    """The tokenizer as a codec for the server; it adds no special tokens to a text."""

    def encode(text: str) -> list[int]:
        return [int(i) for i in tokenizer.encode(text, add_special_tokens=False)]

    def decode(ids: Sequence[int], skip_special: bool) -> str:
        return str(tokenizer.decode(list(ids), skip_special_tokens=skip_special))

    return TextCodec(encode, decode, max(map(len, tokenizer.get_vocab()), default=1))


def chat_of(tokenizer: PreTrainedTokenizerBase) -> EpisodeRenderer | None:
    """The renderer of the tokenizer's chat template; None where it has none that can be used."""
    try:
        renderer = chat_renderer(tokenizer)
    except UserError as error:
        logging.getLogger(__name__).info("no chat: %s", error)
        return None
    assert isinstance(renderer, TokenRenderer), "the renderers of chat templates are"
    return renderer.bounded
