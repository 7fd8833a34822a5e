"""docs/reference: the public API, made of signatures and docstrings. `make reference` writes it.

The source is parsed, never imported. An object is described on the first of the pages that export it; a class
that is only returned, on the page of a function that returns it. Of a docstring, `name: what it is` becomes
an item of a list where the object has a parameter or a field of that name, an indented block becomes a block
of code, and a class in backticks becomes a link.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from textwrap import dedent, indent

import griffe

from agentrl.cli.settings import all_settings
from tests.docs import hooks, keywords, rfc008, shipped, slime_features
from tests.docs.blocks import ROOT
from tests.docs.docstrings import (
    OWN,
    WIDTH,
    fenced,
    joined,
    line_of,
    paragraphs_of,
    parts_of,
    signature,
    signatures_of,
)

FOLDER = ROOT / "docs" / "reference"
PAGES = {
    "agentrl": "what environments and programs are made of",
    "agentrl.tools": "tools, and what they are made of",
    "agentrl.envs.graders": "graders of answers",
    "agentrl.envs": "more of environments: their base class, their registry, scoring",
    "agentrl.envs.check": "the check of an environment",
    "agentrl.envs.gateway": "agents that were not written as environments",
    "agentrl.types": "episodes token by token, and what a step of training consists of",
    "agentrl.records": "the records of a run: its journal and its metrics",
    "agentrl.errors": "what is raised",
    "agentrl.types.seams": "the interfaces of environments, agents, engines and trainers",
}
"""The modules with a page, each with what it holds."""
_MECHANISMS = ("ABC", "NamedTuple", "Protocol")
INTRODUCTION = """\
# API reference

The public names of the package, from their docstrings. `make reference` writes these pages. The guides show
how to use them: [Write your own environment](../write-an-environment.md), [Tools](../tools.md),
[Graders](../graders.md), [Record and replay](../record-and-replay.md). [Settings](settings.md) has the
settings of a run, which are keywords of `agentrl.train` under the same names, and
[Environments](environments.md) the arguments of those that ship.
"""
SETTINGS = "settings.md"
SETTINGS_INTRODUCTION = """\
# Settings

All settings of `agentrl train` and `agentrl sft`. Each is a key in its section's table of a run file, a flag
(`--n-samples-per-prompt`), and a keyword in Python. `agentrl settings WORD` searches them, `agentrl train
--help SECTION` prints a section.

Some settings choose one of several kinds (`advantage_estimator`, `correction`, `gate_statistic`,
`entropy_control`), and a key of another kind is refused. A run file may have the keys of one in a table,
without its name in front: `correction = {name = "tis", clip = 3.0}` is `correction = "tis"` and
`tis_clip = 3.0`.
"""

_CODE = re.compile(r"`[^`\n]+`")
_ORDINARY = griffe.ParameterKind.positional_or_keyword


@dataclass(frozen=True, slots=True)
class Name:
    """A documented object: its public name, and the page and the heading that describe it."""

    name: str
    target: griffe.Object
    page: str
    heading: str

    @property
    def anchor(self) -> str:
        """The heading as code hosts write it in a link."""
        return re.sub(r"[^\w\- ]", "", self.heading.lower()).replace(" ", "-")


@dataclass(slots=True)
class Reference:
    """The documented names by their path, and the links to them by what docstrings call them."""

    names: dict[str, Name] = field(default_factory=dict)
    links: dict[str, tuple[str, str]] = field(default_factory=dict)

    def add(self, name: Name) -> None:
        """Describe an object, unless another page does."""
        if name.target.path in self.names:
            return
        self.names[name.target.path] = name
        self._link(name, name.anchor, name.name)
        if isinstance(name.target, griffe.Class):
            for member in _methods(name.target):
                title = f"{name.name}.{member.name}"
                self._link(name, re.sub(r"[^\w]", "", title.lower()), title)

    def _link(self, name: Name, anchor: str, title: str) -> None:
        for spelling in (title, f"{title}()", f"{name.page}.{title}"):
            self.links.setdefault(spelling, (name.page, anchor))

    def of_page(self, page: str) -> list[Name]:
        """The names of a page: classes, functions, others, each by the alphabet."""
        order = {griffe.Kind.CLASS: 0, griffe.Kind.FUNCTION: 1}
        own = [name for name in self.names.values() if name.page == page]
        return sorted(own, key=lambda name: (order.get(name.target.kind, 2), name.name.lower()))

    def linked(self, text: str, page: str) -> str:
        """Text as Markdown: names of classes and of methods in backticks become links."""
        parts, end = [], 0
        for match in _CODE.finditer(text):
            parts += [_escaped(text[end : match.start()]), self._code(match[0], page)]
            end = match.end()
        return "".join([*parts, _escaped(text[end:])])

    def _code(self, code: str, page: str) -> str:
        spelling = code.strip("`")
        # A name in lower case may be a key, an argument or a tool as well.
        target = self.links.get(spelling) if spelling[0].isupper() or "." in spelling else None
        if target is None:
            return code
        other, anchor = target
        return f"[{code}]({'' if other == page else file_of(other)}#{anchor})"


def file_of(page: str) -> str:
    """The file of a module's page."""
    return f"{page.removeprefix('agentrl.')}.md"


def _escaped(text: str) -> str:
    return text.replace("<", "&lt;").replace("*", r"\*")


def pages(root: Path = ROOT, modules: Mapping[str, str] = PAGES) -> dict[str, str]:
    """The text of every page by the name of its file."""
    logging.getLogger("griffe").setLevel(logging.CRITICAL)
    loader = griffe.GriffeLoader(search_paths=[root], allow_inspection=False)
    package = loader.load(next(iter(modules)).partition(".")[0])
    loader.resolve_aliases(implicit=True, external=False)
    reference = Reference()
    for page in modules:
        for export, target in _exported(loader.modules_collection[page]):
            if target.package is package:
                reference.add(Name(export, target, page, _heading(export, target)))
    for page in modules:
        for target in [name.target for name in reference.of_page(page)]:
            for result in _returned(target, loader.modules_collection):
                reference.add(Name(result.name, result, page, _heading(result.name, result)))
    texts = {file_of(page): _page(page, loader.modules_collection[page], reference) for page in modules}
    if modules is PAGES:
        texts |= {SETTINGS: settings_page(), shipped.NAME: shipped.page()}
    return {"README.md": _index(modules, reference), **texts}


def settings_page() -> str:
    """The settings of runs by section, with what they are when they are left out."""
    lines = [SETTINGS_INTRODUCTION]
    for section, settings in groupby(all_settings(), key=lambda setting: setting.section):
        lines += [f"## {section}", "", "| setting | left out | |", "|---|---|---|"]
        for setting in settings:
            default = "" if setting.default is None else f"`{json.dumps(setting.default)}`"
            lines.append(f"| `{setting.name}` | {default} | {setting.text.replace('|', '&#124;')} |")
        lines.append("")
    return "\n".join(lines)


def _exported(module: griffe.Module) -> Iterator[tuple[str, griffe.Object]]:
    """What a module exports by `__all__`; without one, its own classes."""
    if module.exports is None:
        yield from ((name, member) for name, member in module.members.items() if _is_public_class(member))
    # A name that only exists at run time is not there; the test of public names finds it.
    for name in sorted({*map(str, module.exports or ())} & module.members.keys()):
        member = module[name]
        target = member.final_target if isinstance(member, griffe.Alias) else member
        # A function hides the module of its name.
        target = target[name] if isinstance(target, griffe.Module) else target
        if isinstance(target, griffe.Object):
            yield name, target


def _is_public_class(member: object) -> bool:
    return isinstance(member, griffe.Class) and not member.name.startswith("_")


def _returned(target: griffe.Object, modules: griffe.ModulesCollection) -> Iterator[griffe.Class]:
    """The classes of the package in the return type of a function."""
    returns = target.returns if isinstance(target, griffe.Function) else None
    names = returns.iterate() if isinstance(returns, griffe.Expr) else ()
    for path in {name.canonical_path for name in names if isinstance(name, griffe.ExprName)}:
        if path.startswith(f"{target.package.path}."):
            found = modules[path]
            result = found.final_target if isinstance(found, griffe.Alias) else found
            if isinstance(result, griffe.Class):
                yield result


def _heading(name: str, target: griffe.Object) -> str:
    if isinstance(target, griffe.Class):
        return f"class {name}"
    # In backticks, so that the underscores of a name are no markup.
    return f"{name}()" if isinstance(target, griffe.Function) else f"`{name}`"


def _index(modules: Mapping[str, str], reference: Reference) -> str:
    rows = ["| module | |", "|---|---|"]
    rows += [f"| [`{module}`]({file_of(module)}) | {holds} |" for module, holds in modules.items()]
    lists = []
    for module in modules:
        links = [f"[`{n.name}`]({file_of(module)}#{n.anchor})" for n in reference.of_page(module)]
        lists.append(f"## {module}\n\n{' · '.join(links)}")
    return "\n\n".join([INTRODUCTION.rstrip(), "\n".join(rows), *lists]) + "\n"


def _page(page: str, module: griffe.Module, reference: Reference) -> str:
    names = reference.of_page(page)
    blocks = [f"# {page}", *_prose(_docstring(module), page, reference), "[All modules](README.md)"]
    rows = ["| | |", "|---|---|"]
    for name in names:
        summary = reference.linked(_summary(name.target), page).replace("|", r"\|")
        rows.append(f"| [`{name.name}`](#{name.anchor}) | {summary} |")
    blocks.append("\n".join(rows))
    for name in names:
        blocks += [f"## {name.heading}", *_described(name, reference)]
    return "\n\n".join(block for block in blocks if block) + "\n"


def _docstring(target: griffe.Object) -> str:
    return "" if target.docstring is None else target.docstring.value


def _summary(target: griffe.Object) -> str:
    """The first sentence of a docstring, on one line."""
    paragraph = _docstring(target).partition("\n\n")[0].replace("\n", " ")
    return re.split(r"(?<=[.;:]) (?=[A-Z`]|\w+: )", paragraph)[0].rstrip(":;")


def _described(name: Name, reference: Reference) -> Iterator[str]:
    target, page = name.target, name.page
    if isinstance(target, griffe.Class):
        yield from _class(name, target, reference)
    elif isinstance(target, griffe.Function):
        yield fenced("\n".join(signatures_of(name.name, target)))
        yield from _text(target, page, reference)
    elif isinstance(target, griffe.Attribute):
        declared = f"{name.name} = {target.value}"
        # A longer one is what a library makes of the type; its docstring says what it is.
        if len(declared) <= WIDTH:
            yield fenced(declared)
        yield from _text(target, page, reference)
    yield f"Source: [{_source(target)}](../../{_source(target)})"


def _source(target: griffe.Object) -> str:
    return Path(str(target.relative_package_filepath)).as_posix()


def _class(name: Name, target: griffe.Class, reference: Reference) -> Iterator[str]:
    own = _constructor(target)
    yield fenced(signature(f"class {name.name}", own, None) if own else f"class {name.name}")
    bases = [base for base in target.bases if str(base).rpartition(".")[2] not in _MECHANISMS]
    if bases:
        yield f"Extends {', '.join(reference.linked(f'`{base}`', name.page) for base in bases)}."
    yield from _text(target, name.page, reference)
    for method in _methods(target):
        yield f"### {name.name}.{method.name}()"
        yield fenced("\n".join(signatures_of(method.name, method)))
        yield from _text(method, name.page, reference)


def _is_a(target: griffe.Class, *names: str) -> bool:
    return any(str(base).rpartition(".")[2] in names for base in target.bases)


def _constructor(target: griffe.Class) -> list[griffe.Parameter]:
    if _is_a(target, "NamedTuple"):
        fields = [attribute for attribute in _attributes(target) if "property" not in attribute.labels]
        return [
            griffe.Parameter(f.name, annotation=f.annotation, kind=_ORDINARY, default=f.value) for f in fields
        ]
    made = (target.all_members.get(name) for name in ("__init__", "__new__"))
    init = next((method for method in made if isinstance(method, griffe.Function)), None)
    parameters = target.parameters if init is None else init.parameters
    return [parameter for parameter in parameters if parameter.name not in OWN]


def _methods(target: griffe.Class) -> list[griffe.Function]:
    members = [m for m in target.members.values() if isinstance(m, griffe.Function)]
    return [member for member in members if member.name[0] != "_" and member.docstring is not None]


def _attributes(target: griffe.Object) -> list[griffe.Attribute]:
    """Public fields and properties."""
    members = [m for m in target.members.values() if isinstance(m, griffe.Attribute)]
    return [member for member in members if member.name[0] != "_"]


def _fields(target: griffe.Object) -> dict[str, str]:
    """Parameters, fields and properties by name, as lists show them: a signature has types of its own."""
    if isinstance(target, griffe.Function):
        return {parameter.name: parameter.name for parameter in target.parameters}
    if not isinstance(target, griffe.Class):
        return {}
    declared = {parameter.name: parameter.name for parameter in _constructor(target)}
    return {attribute.name: _declaration(attribute) for attribute in _attributes(target)} | declared


def _declaration(attribute: griffe.Attribute) -> str:
    kind = "" if attribute.annotation is None else f": {attribute.annotation}"
    value = "" if attribute.value is None or "property" in attribute.labels else f" = {attribute.value}"
    return f"{attribute.name}{kind}{value}"


def _text(target: griffe.Object, page: str, reference: Reference) -> Iterator[str]:
    """The docstring: prose with its items, then fields that have docstrings of their own, then the errors."""
    declared = _fields(target)
    described: dict[str, str] = {}
    raised: list[str] = []
    docstring = griffe.Docstring(joined(_docstring(target), declared), parent=target)
    for section in docstring.parse("google"):
        match section:
            case griffe.DocstringSectionText():
                parts = parts_of(section.value, declared)
                yield from _prose(parts.before, page, reference)
                if parts.after:
                    yield _listed(parts.items, declared, page, reference)
                    yield from _prose(parts.after, page, reference)
                else:
                    described |= parts.items
            case griffe.DocstringSectionParameters():
                described |= {item.name: item.description for item in section.value}
            case griffe.DocstringSectionRaises():
                raised += [f"`{item.annotation}`: {item.description}" for item in section.value]
            case griffe.DocstringSectionAdmonition():
                text = f"{section.title}:\n\n{indent(section.value.description, '    ')}"
                yield from _prose(text, page, reference)
            case _:
                raise ValueError(f"{target.path}: no form for the section {section.kind}")
    attributes = _attributes(target)
    described |= {attribute.name: _docstring(attribute) for attribute in attributes if attribute.docstring}
    if isinstance(target, griffe.Class) and _is_a(target, "Enum", "IntEnum", "StrEnum"):
        described |= {attribute.name: described.get(attribute.name, "") for attribute in attributes}
    yield _listed(described, declared, page, reference)
    if raised:
        yield "Raises:\n\n" + "\n".join(f"- {reference.linked(line_of(item), page)}" for item in raised)


def _listed(items: Mapping[str, str], declared: Mapping[str, str], page: str, reference: Reference) -> str:
    """A list of names and what they are; names that are described together have one item."""
    names: dict[str, list[str]] = {}
    for name, text in items.items():
        names.setdefault(text or name, []).append(f"`{declared[name]}`")
    return "\n".join(
        f"- {', '.join(together)}{'' if text in items else f': {reference.linked(line_of(text), page)}'}"
        for text, together in names.items()
    )


def _prose(text: str, page: str, reference: Reference) -> Iterator[str]:
    for paragraph in paragraphs_of(text):
        if paragraph.startswith("    "):
            yield fenced(dedent(paragraph))
        else:
            yield reference.linked(paragraph, page)


def write() -> None:
    """Write every page, and remove those that are none any more; and the types of keywords."""
    texts = pages()
    FOLDER.mkdir(exist_ok=True)
    for path in FOLDER.glob("*.md"):
        if path.name not in texts:
            path.unlink()
    for name, text in texts.items():
        (FOLDER / name).write_text(text, encoding="utf-8")
    keywords.write()
    hooks.write()
    slime_features.write()
    rfc008.write()


if __name__ == "__main__":
    write()
