"""`agentrl settings`."""

from __future__ import annotations

import json
from typing import NamedTuple

import rich_click as click
from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from agentrl.assembly.config import RunConfig
from agentrl.cli.commands import Command
from agentrl.config import leaves, others_of, spellings
from agentrl.errors import ConfigError
from agentrl.types import JSON

OTHERS = "of other tools"


class Setting(NamedTuple):
    """A setting as it is listed. text: its description."""

    name: str
    section: str
    default: JSON
    text: str


@click.command("settings", cls=Command, context_settings={"ignore_unknown_options": True})
@click.argument("words", nargs=-1)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def settings_command(words: tuple[str, ...], as_json: bool) -> None:
    """List the settings of runs whose name, section or description has all of WORDS; without any, all.

    A setting is a key in its section's table of a run file, a flag (--n-samples-per-prompt) and a keyword in
    Python. Where none is found, settings of other tools are, each with what to do in place of it.
    """
    found = [setting for setting in all_settings() if _has(setting, words)]
    found = found or [setting for setting in other_settings() if _has(setting, words)]
    if not found:
        raise ConfigError(f"no setting has {' and '.join(words)} in its name or description; try one word.")
    if as_json:
        click.echo(json.dumps([setting._asdict() for setting in found]))
        return
    console, section = Console(highlight=False), ""
    for setting in found:
        if setting.section != section:
            section = setting.section
            console.print(Text(f"[{section}]", style="bold"))
        value = "" if setting.section == OTHERS else f" = {_default_text(setting.default)}"
        head = Text.assemble((setting.name, "cyan"), value)
        console.print(Padding(head, (0, 0, 0, 2)))
        console.print(Padding(Text(setting.text), (0, 0, 0, 6)))


def _default_text(default: JSON) -> str:
    return "left out" if default is None else json.dumps(default)


def all_settings() -> list[Setting]:
    """All settings of `agentrl train` and `agentrl sft`, section by section; then their other names."""
    found = []
    for name, (section, leaf) in leaves(RunConfig).items():
        default = leaf.get_default(call_default_factory=True)
        # As JSON has it: tuples are lists there.
        plain: JSON = json.loads(json.dumps(default, default=str))
        found.append(Setting(name, section, plain, " ".join((leaf.description or "").split())))
    found += [
        Setting(name, section, None, spelling.text)
        for name, (section, spelling) in spellings(RunConfig).items()
    ]
    order = {section: number for number, section in enumerate(dict.fromkeys(s.section for s in found))}
    return sorted(found, key=lambda setting: order[setting.section])


def other_settings() -> list[Setting]:
    """The settings of other tools, each with what to do in place of it."""
    return [Setting(name, OTHERS, None, text) for name, text in others_of(RunConfig).items()]


def _has(setting: Setting, words: tuple[str, ...]) -> bool:
    text = f"{setting.name} {setting.section} {setting.text}".lower()
    return all(
        word.lower().removeprefix("--").replace("-", "_") in text or word.lower() in text for word in words
    )
