"""The kind of command that all commands of agentrl are: what they refuse, and how their --help is set."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import ClassVar

import rich_click as click
from click import Context
from rich.padding import Padding
from rich.table import Table
from rich.text import Text
from rich_click.rich_context import RichContext
from rich_click.rich_help_formatter import RichHelpFormatter
from rich_click.rich_help_rendering import get_help_parameter
from rich_click.rich_panel import RichOptionPanel

from agentrl.errors import ConfigError

_INDENT = (0, 0, 0, 6)
_FRAME = 4
"""Columns of a panel's border and padding."""


class OptionPanel(RichOptionPanel):
    """The options of one group: a table, or, where that would cut their names, each above its own help."""

    def get_table(self, command: click.RichCommand, ctx: RichContext, formatter: RichHelpFormatter) -> Table:
        """The table inside of the panel."""
        width = formatter.console.width - _FRAME
        heads = {option: _head(option, ctx, width) for option in self.get_objects(command, ctx)}
        if all(head.cell_len <= width // 3 for head in heads.values()):
            return super().get_table(command, ctx, formatter)
        table = Table.grid(padding=0)
        for option, head in heads.items():
            assert isinstance(option, click.Option | click.Argument), "click has no third kind"
            table.add_row(head)
            table.add_row(Padding(get_help_parameter(option, ctx, formatter), _INDENT))
        return table


def _head(option: click.Parameter, ctx: Context, width: int) -> Text:
    """The names of an option and what it takes; it wraps between them, and inside of none."""
    head = Text(", ").join(Text(name, style="option") for name in option.opts)
    if option.secondary_opts:
        return Text(" / ").join([head, *(Text(name, style="option") for name in option.secondary_opts)])
    if getattr(option, "is_flag", False):
        return head
    takes = option.make_metavar(ctx)
    if head.cell_len + len(takes) >= width:
        takes = takes.replace("|", " | ")
    return Text(" ").join([head, Text(takes, style="metavar")])


class HelpFormatter(RichHelpFormatter):
    """Sets --help with these panels."""

    option_panel_class = OptionPanel


class CommandContext(RichContext):
    """The context of a command whose --help is set so."""

    formatter_class = HelpFormatter


class Command(click.RichCommand):
    """A command that refuses an option which is given twice: no setting is accepted and ignored.

    several: by the name of an option, what to do where several values are meant.
    """

    context_class = CommandContext
    several: ClassVar[Mapping[str, str]] = MappingProxyType({})

    def parse_args(self, ctx: Context, args: list[str]) -> list[str]:
        """Parse the arguments.

        Raises:
            ConfigError: an option that has one value is given twice.
        """
        if not ctx.resilient_parsing:
            _, _, order = self.make_parser(ctx).parse_args(list(args))
            self._refuse_repeated(order)
        return super().parse_args(ctx, args)

    def _refuse_repeated(self, order: Sequence[click.Parameter]) -> None:
        given: set[str] = set()
        for option in order:
            name = option.name or ""
            is_switch = getattr(option, "is_flag", False) and not option.secondary_opts
            if name in given and not (option.multiple or is_switch or isinstance(option, click.Argument)):
                remedy = self.several.get(name, "give it once")
                raise ConfigError(f"{max(option.opts, key=len)} is given twice; {remedy}.")
            given.add(name)


class CommandGroup(click.RichGroup):
    """A group of such commands."""

    context_class = CommandContext
    command_class = Command
