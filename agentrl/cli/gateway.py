"""`agentrl gateway`."""

from __future__ import annotations

import json
from pathlib import Path

import rich_click as click

from agentrl.cli.flags import EngineFlags, config_flags, flag_values
from agentrl.config import by_section, parse, refuse_inactive
from agentrl.evaluation.config import GatewayConfig


@config_flags(GatewayConfig)
@click.command("gateway", cls=EngineFlags)
@click.option("--model", metavar="DIR", help="Hugging Face model directory to serve.")
@click.option("--json", "as_json", is_flag=True, help="Print the address as one JSON line.")
def gateway_command(model: str | None, as_json: bool, **flags: str | bool | None) -> None:
    """Serve a model to tools that you have, and record each conversation as an episode.

    The model is a directory (--model), or behind a chat endpoint (--openai-url, --openai-model). Clients of
    OpenAI take ADDRESS/v1, those of Anthropic ADDRESS. The key that a client sends names its episode, as does
    a name in the path: ADDRESS/NAME/v1.

    Episodes are in --output-dir, each as soon as it has ended: read them with `agentrl view`, fine-tune on
    them with `agentrl sft --sft-data`, score them with `agentrl rescore`. Behind a chat endpoint there are
    messages alone: tokens and logprobs are not recorded, and nothing can be trained on exactly.

    Ctrl-C ends it, and all episodes that are open.
    """
    from agentrl.evaluation.gateway import serve_gateway

    given = flag_values(flags, GatewayConfig)
    config = parse(GatewayConfig, by_section(GatewayConfig, given), source="the flags")
    refuse_inactive(config, given, source="the flags")
    is_exact = model is not None

    def ready(url: str, folder: Path) -> None:
        what = "with their tokens" if is_exact else "as messages without tokens, since an endpoint sends none"
        line = (
            f"{url}/v1 is ready; {url}/NAME/v1 is the episode NAME. Episodes are recorded in {folder}, "
            f"{what}. Ctrl-C ends the gateway."
        )
        facts = {"url": url, "folder": str(folder), "has_tokens": is_exact}
        click.echo(json.dumps(facts) if as_json else line)

    number = serve_gateway(model, config, ready=ready)
    if not as_json:
        click.echo(f"{number:,} episodes in {config.gateway.output_dir}")
