"""What a benchmark plays: environments, policies, and the settings of each pair; from flags or a TOML file.

    [defaults]                          settings of `agentrl eval`, for all environments and models
    n = 64

    [[env]]
    id = "HopSearch-v0"                 an id, or a pattern such as "ReasoningGym-*"
    temperature = 0.6                   its own settings

    [[env]]
    id = "SingleTurn-v0"
    name = "math"                       the name of its rows; left out, the id
    reward = "exact_match"
    eval_prompt_data = { aime = "aime.jsonl", gpqa = "gpqa.jsonl" }

    [[model]]
    model = "runs/quickstart/checkpoint"       a directory, NAME@URL of a chat endpoint,
    name = "trained"                           expert, null or random

    [prices.trained]                    of a million tokens, in any currency
    prompt = 0.1
    completion = 0.4

Of several values of one setting that of [override] counts (flags are written there), then that of the model,
of the environment, of [defaults].
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tomli_w
from pydantic import Field, ValidationError

from agentrl.config import Section, by_section, leaves, parse, spellings
from agentrl.engine.chat.config import Price
from agentrl.engine.chat.settings import Prices
from agentrl.envs import env_ids, find, matching
from agentrl.errors import ConfigError, did_you_mean
from agentrl.evaluation.config import SCRIPTS, EvalConfig
from agentrl.processes.config import ClusterConfig
from agentrl.rollout.config import CUTS
from agentrl.runtime.ownership import write_signed
from agentrl.types import JSON

Flat = Mapping[str, JSON]
Kind = Literal["script", "directory", "endpoint"]

SUITE = "suite.toml"
"""The file of a suite in the folder of its benchmark."""
NO_SETTINGS = frozenset(
    {"output_dir", "openai_url", "openai_model", "price_prompt", "price_completion", "price_cached"}
    | {"sglang_models", *ClusterConfig.model_fields}
)
"""Settings of `agentrl eval` that are no settings of a benchmark: it has its own words for them, or none."""
_SCRIPT_UNUSED = frozenset({"temperature", *CUTS, "eval_max_response_len", "num_threads"})
_OF_MODELS = frozenset({"rendering", "engine", "openai"})
_UNUSED: Mapping[Kind, frozenset[str]] = {
    "script": _OF_MODELS,
    "directory": frozenset({"openai"}),
    "endpoint": frozenset({"rendering", "engine"}),
}
"""The sections without effect, by the kind of policy."""
_NAMED = re.compile(r"(?P<name>[\w.+-]+)=(?P<target>.+)")
_ENDPOINT = re.compile(r"(?P<model>.+?)@(?P<url>https?://.+)")


class ModelPrices(Section):
    """Prices of a million tokens of a model, in any currency."""

    prompt: Price
    """Of prompt tokens."""
    completion: Price
    """Of completion tokens, reasoning included."""
    cached: Price | None = None
    """Of prompt tokens that came from a cache; left out, prompt."""

    def as_prices(self) -> Prices:
        """As the prices of a turn."""
        return Prices(self.prompt, self.completion, self.prompt if self.cached is None else self.cached)


class SuiteFile(Section):
    """The tables of a suite's file, as they stand there."""

    defaults: dict[str, JSON] = Field(default_factory=dict)
    """Settings of `agentrl eval` for all environments and models."""
    env: list[dict[str, JSON]] = Field(default_factory=list)
    """Environments: id, name, settings."""
    model: list[dict[str, JSON]] = Field(default_factory=list)
    """Policies: model, name, settings."""
    prices: dict[str, ModelPrices] = Field(default_factory=dict)
    """Prices by the name of a model."""
    override: dict[str, JSON] = Field(default_factory=dict)
    """Settings in place of all others."""

    @classmethod
    def of(cls, tables: Mapping[str, JSON], path: Path) -> SuiteFile:
        """The tables of a file. path: for the sentence.

        Raises:
            ConfigError: they hold something else.
        """
        try:
            return cls.model_validate(tables)
        except ValidationError as error:
            problem = error.errors()[0]
            place = ".".join(map(str, problem["loc"]))
            known = ", ".join(cls.model_fields)
            raise ConfigError(
                f"{path}: `{place}`: {problem['msg']}; a suite has the tables {known}."
            ) from None


@dataclass(frozen=True, slots=True)
class EnvChoice:
    """An environment of a suite. name: of its rows. settings: its own."""

    id: str
    name: str
    settings: Flat


@dataclass(frozen=True, slots=True)
class PolicyChoice:
    """A policy of a suite. target: a script's name, a directory, or NAME@URL. settings: its own."""

    name: str
    kind: Kind
    target: str
    settings: Flat

    @property
    def endpoint(self) -> Flat:
        """The settings that name an endpoint; empty for other kinds."""
        match = _ENDPOINT.fullmatch(self.target)
        return {} if match is None else {"openai_url": match["url"], "openai_model": match["model"]}


@dataclass(frozen=True, slots=True)
class Suite:
    """A benchmark's environments, policies, settings and prices, all checked."""

    envs: tuple[EnvChoice, ...]
    policies: tuple[PolicyChoice, ...]
    defaults: Flat
    override: Flat
    prices: Mapping[str, ModelPrices]

    @classmethod
    def of(cls, file: SuiteFile) -> Suite:
        """The suite of a file's tables, or of the same made of flags.

        Raises:
            UserError: there is no such environment, model or setting, two have one name, or a setting or a
                price has no effect.
        """
        envs = tuple(_envs(file.env))
        policies = tuple(map(_policy, file.model))
        if not envs:
            raise ConfigError(
                "a benchmark needs environments: ids with commas between them, or a suite's [[env]]."
            )
        if not policies:
            raise ConfigError(
                "a benchmark needs policies: --model with a directory, NAME@URL of a chat endpoint, "
                f"{', '.join(SCRIPTS)}; or a suite's [[model]]."
            )
        _refuse_repeated("environments", [env.name for env in envs])
        _refuse_repeated("models", [policy.name for policy in policies])
        for name in file.prices:
            if name not in (names := [policy.name for policy in policies]):
                raise ConfigError(
                    f"prices: there is no model `{name}`.{did_you_mean(name, names)} "
                    f"There is {', '.join(names)}."
                )
        suite = cls(envs, policies, file.defaults, file.override, file.prices)
        suite._check_settings()
        return suite

    def config(self, env: EnvChoice, policy: PolicyChoice) -> EvalConfig:
        """The settings of one pair.

        Raises:
            ConfigError: a value does not fit.
        """
        sections = _section_names()
        unused = _UNUSED[policy.kind]
        settings = {**self.defaults, **env.settings, **policy.settings, **self.override}
        acting = {
            name: value
            for name, value in settings.items()
            if sections[name] not in unused and not (policy.kind == "script" and name in _SCRIPT_UNUSED)
        }
        values = by_section(EvalConfig, {**acting, **policy.endpoint})
        return parse(EvalConfig, values, source=f"{env.name}, {policy.name}")

    def write(self, path: Path) -> None:
        """Write the suite as a file that gives the same suite.

        Raises:
            ConfigError: a setting is null, which TOML cannot represent.
        """
        tables: dict[str, JSON] = {
            "defaults": dict(self.defaults),
            "env": [{"id": env.id, "name": env.name, **env.settings} for env in self.envs],
            "model": [{"model": p.target, "name": p.name, **p.settings} for p in self.policies],
            "prices": {name: price.model_dump(exclude_none=True) for name, price in self.prices.items()},
            "override": dict(self.override),
        }
        try:
            write_signed(path, tomli_w.dumps(tables))
        except TypeError as error:
            raise ConfigError(f"a setting of the suite cannot be written ({error}); leave it out.") from None

    def _check_settings(self) -> None:
        """Parse the settings of every pair, and refuse those that have no effect on any that they are for.

        Those of [defaults] may be for other environments and models.

        Raises:
            ConfigError: with the name of the setting.
        """
        _check_names("[defaults]", self.defaults)
        _check_names("the settings given", self.override)
        acting: set[str] = set()
        for env in self.envs:
            inactive = [self.config(env, policy).inactive for policy in self.policies]
            for policy, reasons in zip(self.policies, inactive, strict=True):
                acting |= _acting(policy.kind) - reasons.keys()
                _refuse_inactive(f"[[model]] {policy.name}", policy.settings, reasons)
            everywhere = {name: why for name, why in inactive[0].items() if all(name in r for r in inactive)}
            _refuse_inactive(f"[[env]] {env.name}", env.settings, everywhere)
        reason = "on any of these models and environments; choose one that it is for"
        no_effect = {name: reason for name in self.override if name not in acting}
        _refuse_inactive("the settings given", self.override, no_effect)


def _acting(kind: Kind) -> set[str]:
    """The settings that have an effect on a kind of policy."""
    names = {name for name, section in _section_names().items() if section not in _UNUSED[kind]}
    return names - _SCRIPT_UNUSED if kind == "script" else names


def _refuse_inactive(source: str, settings: Flat, inactive: Mapping[str, str]) -> None:
    for name in settings:
        if name in inactive:
            raise ConfigError(f"{source}: {name} has no effect {inactive[name]}, or leave {name} out.")


def named_policy(text: str) -> dict[str, JSON]:
    """The [[model]] table of a flag: NAME=TARGET, or a target, which is then its own name."""
    match = _NAMED.fullmatch(text)
    return {"model": text} if match is None else {"model": match["target"], "name": match["name"]}


def envs_of(text: str) -> list[dict[str, JSON]]:
    """The [[env]] tables of ids and patterns with commas between them."""
    return [{"id": id} for id in (part.strip() for part in text.split(",")) if id]


def _envs(tables: Sequence[Flat]) -> Iterable[EnvChoice]:
    for table in tables:
        settings = {name: value for name, value in table.items() if name not in ("id", "name")}
        id, name = table.get("id"), table.get("name")
        if not isinstance(id, str) or not isinstance(name, str | None):
            raise ConfigError(f"an [[env]] of a suite has an `id`, and may have a `name`; got {dict(table)}.")
        _check_names(f"[[env]] {id}", settings, without=_OF_MODELS)
        if any(character in id for character in "*?["):
            if name is not None:
                raise ConfigError(
                    f"[[env]] {id} is a pattern, whose rows have the ids as names; drop {name!r}."
                )
            yield from (EnvChoice(match, match, settings) for match in matching(id))
        else:
            if ":" not in id and id not in env_ids():
                # A typo is an error now; an environment that cannot be built is a row later.
                find(id)
            yield EnvChoice(id, name or id, settings)


def _policy(table: Flat) -> PolicyChoice:
    settings = {name: value for name, value in table.items() if name not in ("model", "name")}
    target, name = table.get("model"), table.get("name")
    if not isinstance(target, str) or not isinstance(name, str | None):
        raise ConfigError(f"a [[model]] of a suite has a `model`, and may have a `name`; got {dict(table)}.")
    sections = _section_names()
    _check_names(f"[[model]] {target}", settings)
    for setting in settings:
        if sections[setting] not in _OF_MODELS and setting != "num_threads":
            raise ConfigError(f"[[model]] {target}: {setting} is for environments; move it to [[env]].")
    policy = PolicyChoice(name or target, _kind(target), target, settings)
    unused = [setting for setting in settings if sections[setting] in _UNUSED[policy.kind]]
    if unused:
        raise ConfigError(f"[[model]] {target}: {unused[0]} has no effect on it; leave it out.")
    return policy


def _kind(target: str) -> Kind:
    if target in SCRIPTS:
        return "script"
    if _ENDPOINT.fullmatch(target):
        return "endpoint"
    if target.startswith(("http://", "https://")):
        raise ConfigError(f"{target} serves a model of some name; write NAME@{target}.")
    if not Path(target).is_dir():
        raise ConfigError(
            f"there is no model directory {target}.{did_you_mean(target, SCRIPTS)} A model is a directory, "
            f"NAME@URL of a chat endpoint, {', '.join(SCRIPTS)}."
        )
    return "directory"


def _check_names(source: str, settings: Flat, *, without: frozenset[str] = frozenset()) -> None:
    """Check that settings are those of a benchmark, and of no section in `without`.

    Raises:
        ConfigError: with the name of the setting.
    """
    sections = _section_names()
    for name in settings:
        if name not in sections:
            raise ConfigError(f"{source}: unknown setting `{name}`.{did_you_mean(name, sections)}")
        if sections[name] in without:
            raise ConfigError(f"{source}: {name} is for models; move it to [[model]] or [defaults].")


def _section_names() -> dict[str, str]:
    """The section of each setting of a benchmark, under all of its names."""
    names = leaves(EvalConfig) | spellings(EvalConfig)
    return {name: section for name, (section, _) in names.items() if name not in NO_SETTINGS}


def _refuse_repeated(noun: str, names: Sequence[str]) -> None:
    if repeated := [name for name in names if names.count(name) > 1]:
        raise ConfigError(f"two {noun} are called `{repeated[0]}`; give one another name.")


def with_flags(
    file: SuiteFile, *, models: Sequence[str], prices: Mapping[str, JSON] | None, override: Flat
) -> SuiteFile:
    """The tables of a file with those that flags replace.

    Raises:
        ConfigError: prices are not of the form {NAME: {prompt, completion, cached}}.
    """
    update: dict[str, object] = {"override": {**file.override, **override}}
    if models:
        update["model"] = [named_policy(text) for text in models]
    if prices is not None:
        try:
            update["prices"] = {name: ModelPrices.model_validate(price) for name, price in prices.items()}
        except ValidationError as error:
            problem = error.errors()[0]
            raise ConfigError(
                f"--prices: {problem['msg']}; it is a table such as "
                '{"NAME": {"prompt": 0.1, "completion": 0.4}}.'
            ) from None
    return file.model_copy(update=update)
