"""`agentrl serve`."""

from __future__ import annotations

import json

import rich_click as click

from agentrl.cli.commands import Command
from agentrl.cli.flags import config_flags, flag_values
from agentrl.config import Section, by_section, parse
from agentrl.engine.served.config import CONTROL_KEY, ServeSettings, control_key
from agentrl.runtime.extras import TRAINING, require


class _Flags(Section):
    serve: ServeSettings = ServeSettings()


@config_flags(_Flags)
@click.command("serve", cls=Command)
@click.argument("model", metavar="MODEL_FOLDER")
@click.option("--json", "as_json", is_flag=True, help="Print the address as one JSON line.")
def serve_command(model: str, as_json: bool, **flags: str | bool | None) -> None:
    """Serve a model with the embedded engine, over HTTP in SGLang's protocol, and in OpenAI's for chat.

    Give the address to `agentrl eval --engine sglang --sglang-url`, to a client of SGLang, or to its router.
    Or POST {"text": "Once", "sampling_params": {"max_new_tokens": 8}} to /generate, as application/json.
    Where the tokenizer has a chat template, clients of OpenAI's API take the address with /v1, as does
    `agentrl eval --openai-url`: POST {"model": "m", "messages": [{"role": "user", "content": "Hello"}]} to
    /v1/chat/completions; tools, logprobs and streams work, too.
    A run that sends it weights needs the key in AGENTRL_CONTROL_KEY, as the server does. Ctrl-C ends it.
    """
    require("serving a model", *TRAINING)
    from agentrl.assembly.serve import serve_model

    def ready(url: str, max_context_len: int, has_chat: bool) -> None:
        control = "is off without" if control_key() is None else "needs the key in"
        chat = f"chat at {url}/v1" if has_chat else "no chat, since its tokenizer has no chat template"
        line = (
            f"{model} at {url}/generate, {chat}, up to {max_context_len:,} tokens a request; "
            f"control {control} {CONTROL_KEY}; Ctrl-C ends it."
        )
        facts = {"url": url, "max_context_len": max_context_len, "has_chat": has_chat}
        click.echo(json.dumps(facts) if as_json else line)

    settings = parse(_Flags, by_section(_Flags, flag_values(flags, _Flags)), source="the flags").serve
    serve_model(model, settings, ready=ready)
