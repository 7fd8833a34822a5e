"""From names to what installed packages offer: what the registries of tools and of environments share."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import EntryPoint

from agentrl.errors import UserError, did_you_mean


@dataclass(frozen=True, slots=True)
class Names:
    """How one kind of thing is looked up. noun: what people call it. form: how one without a name is written.

    error: what is raised where there is none of that name.
    """

    noun: str
    form: str
    error: type[UserError]

    def loaded(self, point: EntryPoint) -> object:
        """What an installed package offers.

        Raises:
            UserError: of type `error`, the package is broken.
        """
        try:
            return point.load()
        except (ImportError, AttributeError, SyntaxError) as error:
            raise self.error(
                f"`{point.name}` is offered by {point.value}, which cannot be imported: {error}; "
                "mend or reinstall that package."
            ) from error

    def imported(self, path: str) -> object:
        """What stands in a module: `package.module:name`.

        Raises:
            UserError: of type `error`, there is no such module or no such name in it.
        """
        module, _, name = path.partition(":")
        try:
            return getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError, SyntaxError, TypeError, ValueError) as error:
            # TypeError and ValueError: a relative or an empty module name.
            raise self.error(f"no {self.noun} `{path}`: {error}; name it `{self.form}`.") from None

    def unknown(self, name: str, known: Iterable[str]) -> UserError:
        """The error for a name that nothing has; the sentence says what has one."""
        names = sorted(known)
        return self.error(
            f"no {self.noun} `{name}`.{did_you_mean(name, names)} Installed: {', '.join(names) or 'none'}."
        )


def check_arguments(name: str, factory: Callable[..., object], arguments: Mapping[str, object]) -> None:
    """Refuse arguments that a class or function does not take.

    Raises:
        UserError: the sentence shows what it takes.
    """
    takes = inspect.signature(factory)
    known = [one.name for one in takes.parameters.values() if one.kind is not inspect.Parameter.VAR_KEYWORD]
    strange = [key for key in arguments if key not in known]
    if strange and len(known) == len(takes.parameters):
        takes_them = ", ".join(known) or "no arguments"
        near = did_you_mean(strange[0], known)
        raise UserError(f"{name}: there is no argument `{strange[0]}`.{near} It takes {takes_them}.")
    try:
        takes.bind(**arguments)
    except TypeError as error:
        raise UserError(f"{name}: {error}; it is made with {takes}, got {dict(arguments)}.") from None
