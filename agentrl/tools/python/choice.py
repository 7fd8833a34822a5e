"""The choice of a sandbox for this machine."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Literal, NamedTuple

from agentrl.errors import ToolError
from agentrl.tools.python import installation, namespaces, one_process
from agentrl.tools.python.inside.kernel import MACHINE, SUPPORTED
from agentrl.tools.python.inside.wire import SandboxPlan, SessionLimits
from agentrl.tools.python.namespaces import SandboxRefusedError
from agentrl.tools.python.sessions import Backend

Sandboxing = Literal["auto", "namespaces", "bubblewrap", "none"]


class Contents(NamedTuple):
    """What code can use in a sandbox besides Python, by name; see `installation.plan`."""

    packages: Sequence[str] = ()
    preload: Sequence[str] = ()
    programs: Sequence[str] = ()
    mounts: Sequence[tuple[str, str]] = ()
    links: Sequence[tuple[str, str]] = ()


@asynccontextmanager
async def backend(
    sandboxing: Sandboxing, contents: Contents, limits: SessionLimits
) -> AsyncIterator[Backend]:
    """The backend of this kind; `auto` takes namespaces, else bubblewrap.

    Raises:
        SandboxRefusedError: no sandbox is available; the sentence names what to change.
        UserError: a package or a program is missing.
    """
    if sandboxing == "none":
        async with one_process.unprotected() as unprotected:
            yield unprotected
        return
    plan = installation.plan(*contents)
    async with AsyncExitStack() as stack:
        if sandboxing == "bubblewrap":
            chosen: Backend = await _bubblewrapped(plan, limits, stack, "")
        else:
            try:
                _check_platform()
                chosen = await stack.enter_async_context(namespaces.started(plan))
            except SandboxRefusedError as refused:
                if sandboxing == "namespaces":
                    raise _no_sandbox(f"namespaces are refused ({refused})") from None
                chosen = await _bubblewrapped(
                    plan, limits, stack, f"namespaces are refused ({refused}), and "
                )
        yield chosen


def _check_platform() -> None:
    if sys.platform != "linux":
        raise SandboxRefusedError(f"they are Linux's, and this is {sys.platform}")
    if MACHINE not in SUPPORTED:
        raise SandboxRefusedError(f"no filter of system calls is known for {MACHINE}")


async def _bubblewrapped(
    plan: SandboxPlan, limits: SessionLimits, stack: AsyncExitStack, before: str
) -> Backend:
    program = one_process.bubblewrap()
    if program is None:
        raise _no_sandbox(f"{before}bubblewrap is not installed")
    candidate = await stack.enter_async_context(one_process.in_bubblewrap(program, plan))
    try:
        async with await candidate.session(limits) as session:
            await session.run("")
    except ToolError as error:
        raise _no_sandbox(f"{before}bubblewrap does not run here ({error.detail})") from None
    return candidate


def _no_sandbox(why: str) -> SandboxRefusedError:
    return SandboxRefusedError(
        f"the Python tool has no sandbox here: {why}. Allow unprivileged user namespaces (sysctl "
        "kernel.unprivileged_userns_clone = 1, kernel.apparmor_restrict_unprivileged_userns = 0) or install "
        'bubblewrap; `sandbox = "none"` runs code unprotected, with all that you may do.'
    )
