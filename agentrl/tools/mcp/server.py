"""The server of a toolkit: a program to start, or an address. Checked before it is started or reached."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from agentrl.errors import UserError
from agentrl.tools import secrets


@dataclass(frozen=True, slots=True)
class ServerCommand:
    """A server to start.

    path: of the program. env: its whole environment. cwd: None = that of this process.
    """

    path: str
    args: Sequence[str] = field(default=(), repr=False)
    env: Mapping[str, str] = field(default_factory=dict, repr=False)
    cwd: str | None = None


@dataclass(frozen=True, slots=True)
class Address:
    """A server that is reached over streamable HTTP. headers: sent with every request.

    with_session: whether the server keeps state between calls; protocols from 2026 on have no sessions.
    """

    url: str
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    with_session: bool = True


Server = ServerCommand | Address


def with_variables(server: Server) -> Server:
    """The same server, with the variables of this process that its environment, its headers, and the secrets
    on its command line name.

    Raises:
        ConfigError: a variable is not set.
    """
    if isinstance(server, ServerCommand):
        return replace(server, args=secrets.with_options(server.args), env=secrets.with_variables(server.env))
    return replace(server, headers=secrets.with_variables(server.headers))


def command(name: str, args: Sequence[str], env: Mapping[str, str], cwd: str | None) -> ServerCommand:
    """A program, looked up on the PATH of this process: the server inherits none of its environment.

    Raises:
        UserError: there is no such program, or this is not Linux.
    """
    if sys.platform != "linux":
        raise UserError("an MCP server can be started on Linux only; start it yourself and give its `url`.")
    path = shutil.which(name)
    if path is None:
        raise UserError(f"there is no program `{name}` to start; install it, or write its whole path.")
    # Absolute: the server may start in another folder.
    return ServerCommand(os.path.abspath(path), tuple(args), dict(env), cwd)


def address(url: str, headers: Mapping[str, str], *, with_session: bool) -> Address:
    """A URL.

    Raises:
        ConfigError: it is no http or https address, or holds credentials.
    """
    from agentrl.http.guarded import AllowedAddresses

    AllowedAddresses(url)
    return Address(url, dict(headers), with_session)
