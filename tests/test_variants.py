"""Configuration with variants: a key belongs to those that have it, under one flat name."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, get_args

import pytest
from pydantic import Field

from agentrl.algorithms.config import AlgorithmConfig
from agentrl.assembly.config import RunConfig
from agentrl.assembly.load import load_config
from agentrl.config import (
    Needs,
    Section,
    Variant,
    defaults,
    effective_values,
    leaves,
    merge,
    parse,
    write_toml,
)
from agentrl.errors import ConfigError


class Dial(Variant):
    """What all fuels have."""

    level: int = 3
    """How hot."""


class Gas(Dial):
    """A flame."""

    name: Literal["gas"] = "gas"
    prefix: ClassVar[str] = "gas"
    jets: int = 4
    """How many (count)."""


class Wood(Dial):
    """Logs."""

    name: Literal["wood"] = "wood"
    prefix: ClassVar[str] = "wood"
    logs: int | None = 2
    """How many (count)."""
    damp: Annotated[bool, Needs("logs")] = False
    """Whether they smoke."""


class Sun(Variant):
    """For dates."""

    name: Literal["sun"] = "sun"


class Lamp(Section):
    """A table."""

    prefix: ClassVar[str] = "lamp"
    watts: int = 60
    """How bright."""


class Electric(Dial):
    """A wire, which is `hot`, too."""

    name: Literal["an_electric"] = "an_electric"
    prefix: ClassVar[str] = "electric"
    logs: int = 0
    """Of its meter (count)."""


class Stove(Section):
    """What heats, and a table."""

    fuel: Annotated[Gas | Electric | Wood | Sun, Field(discriminator="name")] = Gas()
    """What it burns."""
    heat: int = 1
    """How much of it."""
    lamp: Lamp = Lamp()


FUELS = "input should be 'gas', 'an_electric', 'wood' or 'sun'."


class Hut(Section):
    """A tree with variants."""

    stove: Stove = Stove()


@pytest.mark.parametrize(
    "stove",
    [
        {"fuel": "wood", "wood_logs": 5, "level": 1},
        {"fuel": {"name": "wood", "logs": 5, "level": 1}},
        {"fuel": {"name": "Wood", "logs": 5, "level": 1}},
        {"fuel": "WOOD", "wood": {"logs": 5}, "level": 1},
    ],
)
def test_a_variant_has_its_own_keys_and_those_that_it_shares(stove):
    config = parse(Hut, {"stove": stove}, source="x")
    assert config.stove.fuel == Wood(logs=5, level=1)
    written = {"fuel": "wood", "level": 1, "wood_logs": 5, "wood_damp": False, "heat": 1, "lamp_watts": 60}
    assert effective_values(config) == {"stove": written}
    assert parse(Hut, effective_values(config), source="x") == config


@pytest.mark.parametrize(
    ("stove", "sentence"),
    [
        ({"wood_logs": 5}, "wood_logs has no effect without fuel = wood; choose it, or leave wood_logs out."),
        (
            {"fuel": "sun", "level": 2},
            "level has no effect without fuel = gas, an_electric or wood; choose it, or leave level out.",
        ),
        (
            {"fuel": {"name": "gas", "damp": True}},
            "wood_damp has no effect without fuel = wood; choose it, or leave wood_damp out.",
        ),
        (
            # Two other variants have one.
            {"fuel": {"name": "gas", "logs": 5}},
            "unknown key `stove.fuel.logs`. Did you mean `electric_logs`?",
        ),
        (
            {"fuel": "coal"},
            f"`stove.fuel` = 'coal' does not fit: {FUELS}",
        ),
        ({"fuel": {"name": "gas", "jest": 5}}, "unknown key `stove.fuel.jest`. Did you mean `fuel`?"),
        (
            {"fuel": 3},
            f"`stove.fuel` = 3 does not fit: {FUELS}",
        ),
        (
            {"fuel": None},
            f"`stove.fuel` = None does not fit: {FUELS}",
        ),
        ({"lamp": {"name": "x"}}, "unknown key `stove.lamp.name`. Did you mean `lamp_watts`?"),
        ({"wood": 3}, "[stove.wood] must be a table of settings, got 3."),
        (
            {"fuel": "wood", "wood_logs": "x"},
            "`stove.wood_logs` = 'x' does not fit: input should be a valid integer, unable to parse string "
            "as an integer.",
        ),
        (
            {"wood_logs": 1, "wood": {"logs": 2}},
            "wood_logs and wood both set wood_logs; choose one.",
        ),
    ],
)
def test_a_key_that_a_variant_lacks_cannot_be_set(stove, sentence):
    with pytest.raises(ConfigError) as caught:
        parse(Hut, {"stove": stove}, source="run.toml")
    assert str(caught.value) == f"run.toml: {sentence}"


def test_what_is_off_is_no_key_of_another_variant():
    assert parse(Hut, {"stove": {"wood_damp": False, "wood_logs": None}}, source="x") == Hut()


def test_a_key_without_its_key_is_refused_by_its_flat_name():
    with pytest.raises(ConfigError, match="wood_damp has no effect without wood_logs; add it, or leave wood"):
        parse(Hut, {"stove": {"fuel": "wood", "wood_logs": None, "wood_damp": True}}, source="x")


def test_the_description_of_a_key_says_which_variants_have_it():
    texts = {name: (leaf.description, leaf.default) for name, (_, leaf) in leaves(Hut).items()}
    assert texts == {
        "fuel": ("What it burns.", "gas"),
        "level": ("How hot. Not with fuel = sun.", 3),
        "gas_jets": ("How many (count). Only with fuel = gas.", 4),
        "electric_logs": ("Of its meter (count). Only with fuel = an_electric.", 0),
        "wood_logs": ("How many (count). Only with fuel = wood.", 2),
        "wood_damp": ("Whether they smoke. Only with fuel = wood.", False),
        "heat": ("How much of it.", 1),
        "lamp_watts": ("How bright.", 60),
    }


def test_a_flag_replaces_the_variant_of_the_file_and_not_its_shared_keys():
    base = {"stove": {"fuel": {"name": "wood", "level": 7}}}
    merged = merge(Hut, base, {"stove": {"fuel": "gas", "gas_jets": 2}})
    assert parse(Hut, merged, source="x").stove.fuel == Gas(level=7, jets=2)


ESTIMATORS = get_args(AlgorithmConfig.keys().fields["advantage_estimator"].annotation)


@pytest.mark.parametrize("written", ESTIMATORS)
def test_what_a_run_has_written_is_a_run_file_for_every_other_estimator(tmp_path, written):
    """It holds all defaults, those of settings that the other one lacks included."""
    config = {"env": "HopSearch-v0", "advantage_estimator": written}
    write_toml(load_config(None, config), tmp_path / "config.toml")
    for other in ESTIMATORS:
        # Left out, a setting that both have keeps the value that was written.
        loaded = load_config(tmp_path / "config.toml", {"advantage_estimator": other})
        assert loaded.algorithm.advantage_estimator.name == other
    assert load_config(tmp_path / "config.toml", {}) == load_config(None, config)


def test_a_value_that_is_no_default_is_refused_beside_another_variant_of_a_flag():
    merged = merge(Hut, {"stove": {"fuel": "wood", "wood_logs": 3}}, {"stove": {"fuel": "gas"}})
    with pytest.raises(ConfigError, match="wood_logs has no effect"):
        parse(Hut, merged, source="x")


def test_the_keys_of_a_table_are_those_of_the_variant_that_another_name_gives():
    merged = merge(Hut, {"stove": {"fuel": "wood"}}, {"stove": {"fuel": {"logs": 4}}})
    assert parse(Hut, merged, source="x").stove.fuel == Wood(logs=4)


def test_a_variant_was_set_where_its_name_was_given():
    stove = parse(Hut, {"stove": {"level": 2}}, source="x").stove
    assert (stove.was_set("level"), stove.was_set("fuel")) == (True, False)
    stove = parse(Hut, {"stove": {"fuel": "gas", "level": 2}}, source="x").stove
    assert (stove.was_set("level"), stove.was_set("fuel")) == (True, True)


def test_defaults_are_those_of_every_key_by_its_flat_name():
    stove = {"fuel": "gas", "level": 3, "gas_jets": 4, "electric_logs": 0, "wood_logs": 2, "wood_damp": False}
    assert defaults(Hut) == {"stove": {**stove, "heat": 1, "lamp_watts": 60}}
    assert defaults(RunConfig)["env"]["tools"] == []
