"""From docstrings and signatures to Markdown, for the API reference."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import griffe

WIDTH = 96
"""The longest line of a signature (characters)."""
OWN = ("self", "cls")
_ORDINARY = griffe.ParameterKind.positional_or_keyword


def joined(docstring: str, declared: Mapping[str, str]) -> str:
    """A docstring with each item on one line: indented lines below it would be a section of their own."""
    lines: list[str] = []
    for line in docstring.splitlines():
        if lines and line.startswith("    ") and _is_item(lines[-1], declared):
            lines[-1] += f" {line.strip()}"
        else:
            lines.append(line)
    return "\n".join(lines)


def _is_item(line: str, declared: Mapping[str, str]) -> bool:
    names, colon, _ = line.partition(": ")
    return bool(colon) and all(name in declared for name in names.split(", "))


def line_of(text: str) -> str:
    """Text on one line."""
    return " ".join(text.split())


class Parts(NamedTuple):
    """A text: the prose up to its items, these by name, and the prose after the first of them."""

    before: str
    items: dict[str, str]
    after: str


def parts_of(text: str, declared: Mapping[str, str]) -> Parts:
    """The parts of a text. An item is `name: what it is` at the start of a paragraph or a sentence."""
    if not declared:
        return Parts(text, {}, "")
    known = "|".join(sorted(map(re.escape, declared), key=len, reverse=True))
    names = rf"(?:{known})(?:, (?:{known}))*"
    item = re.compile(rf"(?:^|(?<=[.;)] ))({names}): ")
    before: list[str] = []
    after: list[str] = []
    items: dict[str, str] = {}
    for paragraph in re.split(rf"\n{{2,}}|\n(?={names}: )", text):
        prose = after if items else before
        # A block of code holds no items.
        first, *rest = [paragraph] if paragraph.startswith("    ") else item.split(line_of(paragraph))
        if not rest:
            prose.append(paragraph)
        elif first.strip():
            prose.append(first.strip())
        for together, what in zip(rest[::2], rest[1::2], strict=True):
            items |= dict.fromkeys(together.split(", "), what.strip().rstrip(";"))
    return Parts("\n\n".join(before), items, "\n\n".join(after))


def paragraphs_of(text: str) -> Iterator[str]:
    """Paragraphs; consecutive indented ones are one block of code."""
    code: list[str] = []
    for paragraph in re.split(r"\n{2,}", text.strip("\n")):
        if paragraph.startswith("    "):
            code.append(paragraph)
            continue
        if code:
            yield "\n\n".join(code)
            code = []
        yield paragraph
    if code:
        yield "\n\n".join(code)


def fenced(code: str) -> str:
    """A block of code. Not `python`: guides have blocks that run, these are excerpts."""
    try:
        ast.parse(code if not code.startswith(("class ", "def ", "async def ")) else f"{code}: ...")
    except SyntaxError:
        language = "py" if code.startswith(("class ", "def ", "async def ", "@")) else "text"
    else:
        language = "py"
    return f"```{language}\n{code.rstrip()}\n```"


def signatures_of(name: str, function: griffe.Function) -> Iterator[str]:
    """The signature of a function, or each of its overloads."""
    for form in function.overloads or [function]:
        word = "async def" if "async" in function.labels else "def"
        parameters = [p for p in form.parameters if p.name not in OWN]
        decorators = [f"@{label}" for label in ("classmethod", "staticmethod") if label in function.labels]
        yield "\n".join([*decorators, signature(f"{word} {name}", parameters, form.returns)])


def signature(start: str, parameters: Sequence[griffe.Parameter], returns: object) -> str:
    """On one line where it fits, else a line for each parameter."""
    end = ")" if returns is None else f") -> {returns}"
    declared = list(_parameters(parameters))
    line = f"{start}({', '.join(declared)}{end}"
    if len(line) <= WIDTH:
        return line
    return "\n".join([f"{start}(", *(f"    {item}," for item in declared), end])


def _parameters(parameters: Sequence[griffe.Parameter]) -> Iterator[str]:
    kinds = griffe.ParameterKind
    previous = None
    for parameter in parameters:
        if previous is kinds.positional_only and parameter.kind is not previous:
            yield "/"
        if parameter.kind is kinds.keyword_only and previous not in (
            kinds.keyword_only,
            kinds.var_positional,
        ):
            yield "*"
        previous = parameter.kind
        stars = {kinds.var_positional: "*", kinds.var_keyword: "**"}.get(previous or _ORDINARY, "")
        kind = "" if parameter.annotation is None else f": {parameter.annotation}"
        has_default = parameter.default is not None and not stars
        equals = " = " if kind else "="
        yield f"{stars}{parameter.name}{kind}{f'{equals}{parameter.default}' if has_default else ''}"
    if previous is kinds.positional_only:
        yield "/"
