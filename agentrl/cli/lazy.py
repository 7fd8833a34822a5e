"""A group whose commands are imported when they are called: a list of them, or a completion, imports none."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from types import MappingProxyType
from typing import NamedTuple

import rich_click as click
from click import Context

from agentrl.cli.commands import Command, CommandGroup


class Offer(NamedTuple):
    """A command: where it is, `module:name`, and the first sentence of its help."""

    path: str
    text: str


class LazyGroup(CommandGroup):
    """Commands by name. `load` imports one."""

    offers: Mapping[str, Offer] = MappingProxyType({})

    def offer(self, offers: Mapping[str, Offer]) -> None:
        """Set the commands, in the order of a list; it shows what is not imported."""
        self.offers = offers
        self.commands = {name: Command(name=name, help=offer.text) for name, offer in offers.items()}

    def list_commands(self, ctx: Context) -> list[str]:
        """The names, in order."""
        del ctx
        return [*self.offers]

    def resolve_command(
        self, ctx: Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """The command that is called, imported."""
        name, command, rest = super().resolve_command(ctx, args)
        return name, command if name is None else self.load(name), rest

    def loaded(self) -> dict[str, click.Command]:
        """All commands, imported."""
        return {name: self.load(name) for name in self.offers}

    def load(self, name: str) -> click.Command:
        """Import a command."""
        module, _, attribute = self.offers[name].path.partition(":")
        command = getattr(import_module(module), attribute)
        assert isinstance(command, click.Command), "the table names commands"
        return command
