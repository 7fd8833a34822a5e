"""What a Dockerfile says of its image, before there is one."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from agentrl.envs.harbor.dockerfile import Instruction, instructions

_BUILD_TOOLS = {"build-essential", "gcc", "g++", "make", "cmake", "clang", "git", "cargo", "rustc"}
_LABEL = "org.opencontainers.image."
_LABELS = ("title", "version")
_EXACT = re.compile(r"[\w.-]+(\[[\w.,-]+\])?===?[\w.!+-]+|.*@[0-9a-f]{40}(#.*)?|.*#sha256=[0-9a-f]{64}")
_INSTALL = re.compile(r"\bpip3?\s+install\b(.*)")
_FROZEN = re.compile(r"\buv\s+sync\b.*--(?:frozen|locked)|\bpip3?\s+install\b.*--require-hashes")
_APT = re.compile(r"\bapt(?:-get)?\s+(?:-\S+\s+)*install\b(.*)")
_WITH_VALUE = {
    "-i",
    "--index-url",
    "--extra-index-url",
    "-f",
    "--find-links",
    "-c",
    "--constraint",
    "--prefix",
}
_FILES = ("-r", "--requirement")


OF_DOCKERFILE = ("static.image_hygiene", "static.oci_labels", "static.dependency_pinning")
"""The checks that a Dockerfile decides."""


class Decided(NamedTuple):
    """How a static check came out. faults: sentences, none = it passes; None = it is skipped.

    why: what passes, or why it is skipped.
    """

    faults: tuple[str, ...] | None
    why: str


def of_dockerfile(text: str, requirements: Mapping[str, str]) -> dict[str, Decided]:
    """The static checks that a Dockerfile decides, by id. requirements: the text of such files, by path.

    A pass of `static.dependency_pinning` takes a lock with hashes: names with exact versions leave open what
    they install themselves.
    """
    all_stages = instructions(text)
    if any(each.is_document for each in all_stages):
        return dict.fromkeys(
            OF_DOCKERFILE, Decided(None, "the Dockerfile has a here-document, which is not read")
        )
    last = max((at for at, each in enumerate(all_stages) if each.name == "FROM"), default=0)
    final = all_stages[last:]
    found = {
        "static.image_hygiene": Decided(
            tuple(_unclean(all_stages, final)),
            "the last stage of the Dockerfile keeps no list of packages, no cache of pip and no build tool",
        ),
        "static.oci_labels": Decided(
            tuple(_unlabelled(final)),
            f"the Dockerfile has the labels {' and '.join(f'{_LABEL}{name}' for name in _LABELS)}",
        ),
    }
    commands = [command for each in all_stages if each.name == "RUN" for command in _commands(each.text)]
    loose = tuple(_loose(commands, requirements))
    if loose or any(map(_FROZEN.search, commands)):
        why = "the Dockerfile installs what a lock names, and nothing else by name"
        return {**found, "static.dependency_pinning": Decided(loose, why)}
    why = "the Dockerfile installs exact versions, but no lock says what these install themselves"
    return {**found, "static.dependency_pinning": Decided(None, why)}


def _commands(run: str) -> list[str]:
    """The commands of a RUN, without what stands between them."""
    return [command.strip() for command in re.split(r"&&|\|\||;", run)]


def _unclean(all_stages: Sequence[Instruction], final: Sequence[Instruction]) -> Iterator[str]:
    keeps_none = any(each.name == "ENV" and "PIP_NO_CACHE_DIR" in each.text for each in all_stages)
    for run in (each.text for each in final if each.name == "RUN"):
        packages = {word for found in map(_APT.search, _commands(run)) if found for word in found[1].split()}
        if packages and "rm -rf /var/lib/apt/lists" not in run:
            yield "the Dockerfile keeps the lists of apt; remove /var/lib/apt/lists in the same RUN."
        if tools := sorted(packages & _BUILD_TOOLS):
            yield f"the last stage installs {', '.join(tools)}, which builds need; do it in a stage before."
        if _INSTALL.search(run) and not keeps_none and "--no-cache" not in run:
            yield "the Dockerfile keeps the cache of pip; set PIP_NO_CACHE_DIR."


def _unlabelled(final: Sequence[Instruction]) -> Iterator[str]:
    text = " ".join(each.text for each in final if each.name == "LABEL")
    for name in _LABELS:
        if f"{_LABEL}{name}=" not in text.replace('"', ""):
            yield f"the last stage has no label {_LABEL}{name}; add a LABEL."


def _loose(commands: Sequence[str], requirements: Mapping[str, str]) -> Iterator[str]:
    """A sentence for each requirement of more than one version."""
    unread = dict(requirements)
    for found in map(_INSTALL.search, commands):
        words = iter(_words(found[1])) if found else iter(())
        for word in words:
            if word in ("-e", "--editable"):
                yield f"the Dockerfile installs {next(words, '')} as whatever is there; name a version."
            elif word in _FILES:
                yield from _loose_lines(next(words, ""), unread)
            elif word in _WITH_VALUE:
                next(words, "")
            elif not word.startswith("-") and not _EXACT.fullmatch(word.replace(" ", "")):
                yield f"the Dockerfile installs {word} in any version; name one (==)."


def _loose_lines(path: str, unread: dict[str, str]) -> Iterator[str]:
    """Also of the files that it names. unread: loses those that were read: each is read once."""
    waiting = [path]
    while waiting:
        path = waiting.pop()
        for line in (text.partition(" #")[0].strip() for text in unread.pop(path, "").splitlines()):
            option, _, value = line.replace("=", " ", 1).partition(" ")
            requirement = line.partition(";")[0].partition(" -")[0].replace(" ", "").rstrip("\\")
            if option in _FILES:
                waiting.append(value.strip())
            elif option in ("-e", "--editable"):
                yield f"{path} installs {value.strip()} as whatever is there; name a version."
            elif requirement and not requirement.startswith(("#", "-")) and not _EXACT.fullmatch(requirement):
                yield f"{path} has {requirement} in any version; name one (==)."


def _words(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError:
        return text.split()
