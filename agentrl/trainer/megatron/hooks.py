"""Functions of the user in Megatron's ranks, by their paths: each rank imports and calls them.

init          the rank's process groups are there, no network yet: it may change Megatron
provider      makes a stage of a network, in place of Megatron's GPTModel
before_score  before a network scores samples
before_step   before it learns from a batch, after_step after that, and before_save before its state is saved
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TypeAlias

from megatron.core.models.gpt import GPTModel
from torch import nn

from agentrl.errors import ConfigError, TrainerError
from agentrl.runtime.authorship import place_of
from agentrl.runtime.stage import summary_of
from agentrl.tools.names import Names
from agentrl.trainer.megatron.config import MegatronConfig
from agentrl.types import ScoreRole

MakeModel: TypeAlias = Callable[..., GPTModel]
"""Takes the arguments of GPTModel by their names."""


Stages: TypeAlias = Callable[[], Sequence[nn.Module]]
"""The stages of a network, whose weights may be read then. It is called where a function is."""


class Hooks:
    """Those that a layout names; what it does not name does nothing."""

    def __init__(self, layout: MegatronConfig) -> None:
        self._layout = layout

    def init(self) -> None:
        """The process groups are there, no network yet."""
        path = self._layout.custom_megatron_init_path
        if path is not None:
            _called(path, self._layout)

    def before_score(self, role: ScoreRole, stages: Stages) -> None:
        """The network of a role scores samples next."""
        self._call(self._layout.custom_megatron_before_log_prob_hook_path, role, stages)

    def before_step(self, role: ScoreRole, stages: Stages) -> None:
        """The network of a role learns next."""
        self._call(self._layout.custom_megatron_before_train_step_hook_path, role, stages)

    def after_step(self, role: ScoreRole, stages: Stages) -> None:
        """The network of a role has learned."""
        self._call(self._layout.custom_megatron_after_train_step_hook_path, role, stages)

    def before_save(self, role: ScoreRole, stages: Stages) -> None:
        """The state of a role's network is saved next."""
        self._call(self._layout.custom_megatron_before_save_hook_path, role, stages)

    def _call(self, path: str | None, role: ScoreRole, stages: Stages) -> None:
        if path is not None:
            _called(path, role, stages())


def make_model(layout: MegatronConfig, **arguments: object) -> GPTModel:
    """A stage of a network, by the provider that the layout names, or Megatron's own.

    Raises:
        TrainerError: the provider fails, or makes something else.
    """
    path = layout.custom_model_provider_path
    if path is None:
        return GPTModel(**arguments)
    model = _called(path, **arguments)
    if not isinstance(model, GPTModel):
        raise TrainerError(f"{path} returned a {type(model).__name__}; return a GPTModel of its arguments.")
    return model


def _called(path: str, *arguments: object, **named: object) -> object:
    function = Names("function in Megatron's ranks", "package.module:name", ConfigError).imported(path)
    if not callable(function):
        raise TrainerError(f"{path} is a {type(function).__name__}; name a function.")
    with _Failing(path):
        return function(*arguments, **named)


class _Failing:
    """A block of a user's function: its exception names the function."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __enter__(self) -> None:
        """Nothing to prepare."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, Exception) and not isinstance(error, TrainerError):
            place = place_of(error, installed=False)
            where = f" ({place})" if place else ""
            raise TrainerError(
                f"{self._path} failed in a rank: {summary_of(error)}{where}; mend it."
            ) from error
