"""`agentrl serve-env`."""

from __future__ import annotations

import json

import rich_click as click

from agentrl.cli.commands import Command
from agentrl.cli.envs import env_kwargs_option
from agentrl.cli.flags import config_flags, flag_values, read_json_object
from agentrl.config import Section, by_section, parse
from agentrl.engine.served.config import control_key
from agentrl.envs.openenv.config import ENV_KEY, ServeEnv
from agentrl.tools.secrets import with_secrets


class _Flags(Section):
    serve: ServeEnv = ServeEnv()


@config_flags(_Flags)
@click.command("serve-env", cls=Command)
@click.argument("env_id")
@env_kwargs_option
@click.option("--json", "as_json", is_flag=True, help="Print the address as one JSON line.")
def serve_env_command(env_id: str, env_kwargs: str, as_json: bool, **flags: str | bool | None) -> None:
    """Serve an environment over HTTP in the protocol of openenv 0.10, for trainers and agents of others.

    Clients of OpenEnv take ADDRESS, clients of MCP ADDRESS/mcp. Each session plays episodes of its own: a
    reset of seed n begins task n of the split. An action is {"message": "an answer"}, or a call of a tool:
    {"type": "call_tool", "tool_name": "search", "arguments": {"query": "..."}}.
    With a key in AGENTRL_ENV_KEY, clients send `Authorization: Bearer KEY`; without one, whoever reaches the
    address plays. Ctrl-C ends it, and all episodes.
    """
    from agentrl.envs.openenv.server import serve_env

    def ready(url: str) -> None:
        who = "whoever reaches it" if control_key(ENV_KEY) is None else f"clients with the key in {ENV_KEY}"
        line = f"{env_id} at {url} for {who}, tools also at {url}/mcp; Ctrl-C ends it."
        click.echo(json.dumps({"url": url, "env": env_id}) if as_json else line)

    settings = parse(_Flags, by_section(_Flags, flag_values(flags, _Flags)), source="the flags").serve
    kwargs = with_secrets(read_json_object("--env-kwargs", env_kwargs))
    serve_env(env_id, kwargs, settings, ready=ready)
