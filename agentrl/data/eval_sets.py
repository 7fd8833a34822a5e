"""Held-out prompts: one set without a name, or several by name, each with settings of its own."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import BeforeValidator, Field, ValidationError

from agentrl.config import Count, ImportPath, NameOrPath, Needs, Section
from agentrl.data.columns import Columns
from agentrl.data.paths import parsed, read_paths
from agentrl.errors import did_you_mean
from agentrl.tools.secrets import by_reference
from agentrl.types import JSON

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*")
_NO_NAMES = ("sampled", "greedy", "loss")
Name = Annotated[str, Field(min_length=1)]


class EvalSet(Section):
    """A set of held-out prompts that is not played as the others are. Left out, a key is that of all sets."""

    path: Annotated[str | tuple[str, ...] | dict[str, float], BeforeValidator(read_paths)]
    """Its file, or several, in the form of prompt_data."""
    input_key: Name | None = None
    """Column of the prompt."""
    label_key: Name | None = None
    """Column of the answer."""
    metadata_key: Name | None = None
    """Column of the metadata."""
    tool_key: Name | None = None
    """Column of the tool schemas."""
    num_prompts: Count | None = None
    """Prompts that are played, at most (count)."""
    interval: Count | None = None
    """RL iterations between its evaluations in a training run (count); it is always in the first and last."""
    n_samples_per_eval_prompt: Count | None = None
    """Sampled episodes of each prompt (count)."""
    temperature: Annotated[float, Field(ge=0.0)] | None = None
    """Sampling temperature of the sampled half (0 = greedy)."""
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] | None = None
    """Nucleus sampling (probability mass; 1 = off)."""
    top_k: Annotated[int, Field(ge=0)] | None = None
    """Sample among the k likeliest tokens (count; 0 = off)."""
    max_response_len: Count | None = None
    """Most tokens in one turn of the model (tokens)."""
    system_prompt: Name | None = None
    """Text of a system message before each prompt."""
    reward: NameOrPath | None = None
    """Grader of its answers, in the form of reward."""
    reward_kwargs: Annotated[
        Annotated[dict[str, JSON], by_reference("reward_kwargs")] | None, Needs("reward")
    ] = None
    """Settings of that grader."""
    custom_generate_function_path: ImportPath | None = None
    """Async function that plays its episodes in its own way (package.module:function)."""

    @property
    def sampling(self) -> dict[str, JSON]:
        """Its own settings among those of `EvalSampling`."""
        return _set(
            n_samples_per_eval_prompt=self.n_samples_per_eval_prompt,
            eval_top_p=self.top_p,
            eval_top_k=self.top_k,
            eval_max_response_len=self.max_response_len,
        )

    @property
    def grading(self) -> dict[str, JSON]:
        """Its own settings among those of `RewardChoice`."""
        return {} if self.reward is None else _set(reward=self.reward, reward_kwargs=self.reward_kwargs or {})

    @property
    def generating(self) -> dict[str, JSON]:
        """Its own settings among those of `GenerateChoice`."""
        return _set(custom_generate_function_path=self.custom_generate_function_path)

    def columns(self, of_all: Columns) -> Columns:
        """The columns of its rows. of_all: those of all sets."""
        own = (self.input_key, self.label_key, self.metadata_key, self.tool_key)
        all_ = (of_all.input, of_all.label, of_all.metadata, of_all.tools)
        found = [name or other for name, other in zip(own, all_, strict=True)]
        return Columns(found[0] or of_all.input, *found[1:])


def _set(**settings: JSON) -> dict[str, JSON]:
    """Those that are not left out."""
    return {name: value for name, value in settings.items() if value is not None}


def _read_sets(value: object) -> object:
    """Validate held-out prompts: a path or a table for each name, or paths as `read_paths` accepts them."""
    value = parsed(value)
    if not (isinstance(value, dict) and any(isinstance(own, str | dict | EvalSet) for own in value.values())):
        return read_paths(value)
    for name, own in value.items():
        if not isinstance(own, str | dict | EvalSet):
            raise ValueError(
                f"{name!r} has no path but {own!r}; give every set a path, or every path a weight."
            )
        if not _NAME.fullmatch(name) or name in _NO_NAMES:
            raise ValueError(
                f"a set of prompts cannot be called {name!r}; use letters, digits, `.`, `_` and `-`, and "
                f"none of the names {', '.join(_NO_NAMES)}."
            )
    # Their journals are files whose names have `-` for both.
    if len({name.replace("_", "-") for name in value}) < len(value):
        raise ValueError(f"two of the sets {', '.join(value)} differ only in `-` and `_`; rename one.")
    return {name: _read_set(name, own) if isinstance(own, dict) else own for name, own in value.items()}


def _read_set(name: str, own: dict[str, JSON]) -> EvalSet:
    """Validate the table of a set.

    Raises:
        ValueError: one sentence with the key and the value.
    """
    for key in sorted(own.keys() - EvalSet.model_fields.keys()):
        raise ValueError(f"the set {name!r} has no setting `{key}`.{did_you_mean(key, EvalSet.model_fields)}")
    if "path" not in own:
        raise ValueError(f"the set {name!r} has no path; name its file.")
    try:
        return EvalSet.model_validate(own)
    except ValidationError as error:
        problem = error.errors()[0]
        if problem["type"] == "value_error":
            raise ValueError(f"the set {name!r}: {problem['msg'].removeprefix('Value error, ')}") from None
        where = f"the set {name!r}: `{problem['loc'][0]}` = {own[str(problem['loc'][0])]!r}"
        reason = problem["msg"][:1].lower() + problem["msg"][1:]
        raise ValueError(f"{where} does not fit: {reason}.") from None


EvalPaths = Annotated[
    str | tuple[str, ...] | dict[str, str | EvalSet] | dict[str, float] | None, BeforeValidator(_read_sets)
]
"""Paths, or sets of prompts: a table of name and path, or of name and `EvalSet`; as a flag NAME PATH [NAME
PATH ...], or JSON."""


NO_SETTINGS = EvalSet(path=())
"""Of a set that is played as all are."""


def sets_of(
    paths: str | tuple[str, ...] | dict[str, str | EvalSet] | dict[str, float],
) -> dict[str, EvalSet]:
    """Each set of prompts by its name; a single one without a name, which may mix files, is under ""."""
    if not isinstance(paths, dict):
        return {"": EvalSet(path=paths)}
    named = {name: own for name, own in paths.items() if isinstance(own, str | EvalSet)}
    if not named:
        return {
            "": EvalSet(path={path: weight for path, weight in paths.items() if isinstance(weight, float)})
        }
    return {name: own if isinstance(own, EvalSet) else EvalSet(path=own) for name, own in named.items()}
