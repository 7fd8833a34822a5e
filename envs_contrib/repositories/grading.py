"""The grader: an agent's program and the correct one make the same calls, in sandboxes of their own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from agentrl import UserError
from agentrl.tools import PythonTool
from envs_contrib.repositories import inside
from envs_contrib.repositories.programs import LANGUAGES
from envs_contrib.repositories.repository import TESTS, Repository

CALL_S = 3.0
_MOST_REMEMBERED = 1024
_GRADER = Path(inside.__file__).read_text(encoding="utf-8")
_PROGRAMS = ("awk", "basename", "cat", "cut", "dirname", "grep", "head", "printf", "sed", "sh", "sort")
_MORE_PROGRAMS = ("tail", "tr", "uniq", "wc")
Outcome = tuple[int | None, str | None]
"""The exit code and the output of a call; None = too late, or too long."""
_OUTCOMES = TypeAdapter(list[Outcome])
_remembered: dict[tuple[str, ...], list[Outcome]] = {}


async def passes(world: Repository, files: Mapping[str, str]) -> bool:
    """Whether the program among these files does what the correct one does, in every call of the grader.

    Raises:
        ToolError: the sandbox died.
        UserError: an interpreter of this machine runs the correct program differently.
    """
    kept = {path: text for path, text in files.items() if not path.startswith(f"{TESTS}/")}
    if world.path not in kept:
        return False
    right = await correct_outcomes(world)
    return await _outcomes(world, kept) == right


async def correct_outcomes(world: Repository) -> list[Outcome]:
    """What the correct program does in every call.

    Raises:
        ToolError: the sandbox died.
        UserError: the visible calls have other outcomes than the suite says.
    """
    key = (*world.command, *world.correct.values(), *(call.stdin for call in world.calls))
    if key in _remembered:
        return _remembered[key]
    right = await _outcomes(world, world.correct)
    known = [(call.code, call.stdout.encode().decode("latin-1")) for call in world.calls[: world.num_visible]]
    if right[: world.num_visible] != known:
        raise UserError(
            f"Repositories: `{world.command[0]}` of this machine does not run {world.command[-1]} as the "
            f"suite expects; install another one, or leave {world.language} out of `languages`."
        )
    if len(_remembered) >= _MOST_REMEMBERED:
        _remembered.pop(next(iter(_remembered)))
    _remembered[key] = right
    return right


async def _outcomes(world: Repository, files: Mapping[str, str]) -> list[Outcome]:
    """The outcomes of all calls; none where the files make the sandbox end."""
    calls = [(list(call.args), call.stdin) for call in world.calls]
    arguments = (dict(files), list(world.command), calls, CALL_S)
    result = await _sandbox(world.command[0]).run(f"{_GRADER}\noutcomes{arguments!r}")
    try:
        return _OUTCOMES.validate_json(result.output.strip().rpartition("\n")[2])
    except ValidationError:
        return []


@lru_cache(maxsize=len(LANGUAGES))
def _sandbox(interpreter: str) -> PythonTool:
    """The grader's, with the programs of a shell that the suite uses, and one interpreter."""
    more: Sequence[str] = () if interpreter == "python3" else (interpreter,)
    programs = tuple(dict.fromkeys((*_PROGRAMS, *_MORE_PROGRAMS, *more)))
    return PythonTool(
        name="grader",
        programs=programs,
        preload=("subprocess",),
        wall_s=30.0,
        cpu_s=15.0,
        memory_mb=256,
        files_mb=16,
        output_bytes=2_000_000,
    )
