"""Patterns of Python, compared as syntax trees.

Spaces, line breaks, comments and the kind of quotes make no difference.

    a < b                    this expression anywhere
    f(any_x, seed=any_seed)  `any_NAME` is any expression, the same one wherever the name is repeated
    f(*any_rest, k=1)        `*any_NAME` is all further arguments, `**any_NAME` all further keywords
    seed=prompt.seed         a keyword argument, or an assignment to a name
    del x; y()               statements that follow each other
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from textwrap import dedent

ANY = "any_"
Bindings = dict[str, list[ast.AST]]


@dataclass(frozen=True, slots=True)
class Pattern:
    """The code that is replaced, or its replacement: one expression, or statements."""

    nodes: tuple[ast.AST, ...]

    @classmethod
    def of(cls, text: str) -> Pattern:
        """Read a pattern.

        Raises:
            SyntaxError: it is no Python.
        """
        body = ast.parse(dedent(text).strip()).body
        if len(body) == 1 and isinstance(body[0], ast.Expr):
            return cls((body[0].value,))
        return cls(tuple(body))

    @property
    def is_expression(self) -> bool:
        """Whether it is one expression."""
        return isinstance(self.nodes[0], ast.expr)

    @property
    def keyword(self) -> ast.keyword | None:
        """The same as a keyword argument, where it reads `name = value`."""
        match self.nodes:
            case (ast.Assign(targets=[ast.Name(id=name)], value=value),):
                return ast.keyword(arg=name, value=value)
        return None


def _placeholder(node: object) -> str | None:
    """The name of a placeholder, with its stars; None for any other node."""
    match node:
        case ast.Name(id=name) if name.startswith(ANY):
            return name
        case ast.Starred(value=ast.Name(id=name)) if name.startswith(ANY):
            return f"*{name}"
        case ast.keyword(arg=None, value=ast.Name(id=name)) if name.startswith(ANY):
            return f"**{name}"
    return None


def _bound(name: str, nodes: Sequence[ast.AST], bindings: Bindings) -> bool:
    """Bind a placeholder; returns whether it is new or has the same value as before."""
    before = bindings.setdefault(name, list(nodes))
    return [ast.unparse(node) for node in before] == [ast.unparse(node) for node in nodes]


def _same_list(pattern: Sequence[object], nodes: Sequence[object], bindings: Bindings) -> bool:
    name = _placeholder(pattern[-1]) if pattern else None
    if name is None or not name.startswith("*"):
        return len(pattern) == len(nodes) and all(
            same(part, node, bindings) for part, node in zip(pattern, nodes, strict=True)
        )
    first, rest = nodes[: len(pattern) - 1], nodes[len(pattern) - 1 :]
    if name.startswith("**"):
        names = [keyword.arg for keyword in pattern[:-1]]
        first = sorted((node for node in nodes if node.arg in names), key=lambda node: names.index(node.arg))
        rest = [node for node in nodes if node.arg not in names]
    return _same_list(pattern[:-1], first, bindings) and _bound(name, rest, bindings)


def same(pattern: object, node: object, bindings: Bindings) -> bool:
    """Whether a tree matches a pattern. Fills `bindings`."""
    if isinstance(pattern, list):
        return isinstance(node, list) and _same_list(pattern, node, bindings)
    if not isinstance(pattern, ast.AST):
        return type(pattern) is type(node) and pattern == node
    name = _placeholder(pattern)
    if name is not None and isinstance(node, ast.expr):
        return _bound(name, [node], bindings)
    return type(pattern) is type(node) and all(
        same(getattr(pattern, part, None), getattr(node, part, None), bindings)
        for part in pattern._fields
        if part not in {"ctx", "kind", "type_comment"}
    )


class _Filled(ast.NodeTransformer):
    """Substitutes the bindings for the placeholders of the replacement."""

    def __init__(self, bindings: Bindings) -> None:
        self._bindings = bindings

    def visit(self, node: ast.AST) -> ast.AST | list[ast.AST]:
        name = _placeholder(node)
        if name is None:
            return self.generic_visit(node)
        nodes = copy.deepcopy(self._bindings[name])
        return nodes if name.startswith("*") else nodes[0]


@dataclass(frozen=True, slots=True)
class Match:
    """A place in a tree: `size` elements from `index` on in the list `owner.part`, or `owner.part` itself."""

    owner: ast.AST
    part: str
    index: int | None
    size: int
    bindings: Bindings
    as_keyword: bool = False


def _places(tree: ast.AST) -> Iterator[tuple[ast.AST, str, int | None, object]]:
    """Every node below `tree`, with its owner, field and index."""
    for owner in ast.walk(tree):
        for part, value in ast.iter_fields(owner):
            if isinstance(value, ast.AST):
                yield owner, part, None, value
            elif isinstance(value, list):
                yield from ((owner, part, index, node) for index, node in enumerate(value))


@dataclass(frozen=True, slots=True)
class Replacement:
    """A pattern, and its replacement."""

    old: Pattern
    new: Pattern
    changes: bool = field(init=False)

    def __post_init__(self) -> None:
        dumps = [[ast.dump(node) for node in pattern.nodes] for pattern in (self.old, self.new)]
        object.__setattr__(self, "changes", dumps[0] != dumps[1])

    def matches(self, tree: ast.AST) -> list[Match]:
        """Every place below `tree` that matches the old pattern."""
        return [match for place in _places(tree) if (match := self._match(*place)) is not None]

    def _match(self, owner: ast.AST, part: str, index: int | None, node: object) -> Match | None:
        bindings: Bindings = {}
        if isinstance(node, ast.keyword):
            fits = self.old.keyword is not None and same(self.old.keyword, node, bindings)
            return Match(owner, part, index, 1, bindings, as_keyword=True) if fits else None
        if self.old.is_expression:
            fits = isinstance(node, ast.expr) and same(self.old.nodes[0], node, bindings)
            return Match(owner, part, index, 1, bindings) if fits else None
        if index is None or not isinstance(node, ast.stmt):
            return None
        size = len(self.old.nodes)
        statements = getattr(owner, part)[index : index + size]
        return (
            Match(owner, part, index, size, bindings)
            if same(list(self.old.nodes), statements, bindings)
            else None
        )

    def apply(self, match: Match) -> None:
        """Replace a match in its tree."""
        chosen = (self.new.keyword,) if match.as_keyword else self.new.nodes
        new = [_Filled(match.bindings).visit(copy.deepcopy(node)) for node in chosen]
        value = getattr(match.owner, match.part)
        if match.index is None:
            setattr(match.owner, match.part, new[0])
            return
        if isinstance(value[match.index], ast.stmt):
            new = [ast.Expr(node) if isinstance(node, ast.expr) else node for node in new]
        value[match.index : match.index + match.size] = new
