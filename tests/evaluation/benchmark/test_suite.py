"""Suites: what is played, with which settings; every mistake is one sentence before anything is played."""

from __future__ import annotations

import json

import pytest

from agentrl.config import read_toml
from agentrl.envs import register, registry
from agentrl.errors import UserError
from agentrl.evaluation.benchmark.suite import Suite, SuiteFile, envs_of, named_policy, with_flags
from tests.evaluation.benchmark.worlds import Guess

GUESS = "tests.evaluation.benchmark.worlds:Guess"
SUITE = f"""
[defaults]
n = 8
temperature = 0.5

[[env]]
id = "{GUESS}"
name = "guess"
n_samples_per_eval_prompt = 4

[[env]]
id = "Guess-*"
temperature = 0.9

[[model]]
model = "expert"

[[model]]
model = "m@http://127.0.0.1:9/v1"
name = "chat"
openai_max_tokens = 7

[prices.chat]
prompt = 1.0
completion = 2.0
"""


@pytest.fixture(autouse=True)
def _registered(monkeypatch):
    monkeypatch.setattr(registry, "_registered", dict(registry._registered))
    register("Guess-v0", Guess)
    register("Guess-v1", Guess)


def read(tmp_path, text=SUITE, models=(), prices=None, **override):
    path = tmp_path / "suite.toml"
    path.write_text(text)
    return Suite.of(
        with_flags(SuiteFile.of(read_toml(path), path), models=models, prices=prices, override=override)
    )


def settings(suite):
    return {
        (env.name, policy.name): suite.config(env, policy) for env in suite.envs for policy in suite.policies
    }


def test_settings_of_environments_stand_over_the_defaults_and_flags_over_all(tmp_path):
    configs = settings(read(tmp_path))
    assert [name for name, policy in configs if policy == "chat"] == ["guess", "Guess-v0", "Guess-v1"]
    assert [config.eval.temperature for (_, policy), config in configs.items() if policy == "chat"] == [
        *(0.5, 0.9, 0.9)
    ]
    assert configs["guess", "chat"].eval.n_samples_per_eval_prompt == 4
    assert configs["guess", "chat"].openai.openai_max_tokens == 7
    assert configs["guess", "chat"].openai.openai_model == "m"
    assert configs["guess", "expert"].openai.openai_max_tokens is None
    over = settings(read(tmp_path, temperature="0.1", n="3"))
    assert {config.eval.temperature for (_, policy), config in over.items() if policy == "chat"} == {0.1}
    assert {config.eval.n for config in over.values()} == {3}


def test_models_given_as_flags_replace_those_of_the_file(tmp_path):
    text = SUITE.partition("[prices")[0]
    suite = read(tmp_path, text, models=["null", "dice=random"])
    assert [(policy.name, policy.target) for policy in suite.policies] == [
        ("null", "null"),
        ("dice", "random"),
    ]


def test_a_suite_that_is_written_gives_the_same_suite(tmp_path):
    suite = read(tmp_path, openai_max_tokens="5")
    suite.write(tmp_path / "again.toml")
    again = Suite.of(SuiteFile.of(read_toml(tmp_path / "again.toml"), tmp_path / "again.toml"))
    assert settings(again) == settings(suite)
    assert again.prices == suite.prices


def test_ids_and_patterns_have_commas_between_them():
    suite = Suite.of(SuiteFile(env=envs_of(f"Guess-*, {GUESS}"), model=[named_policy("expert")]))
    assert [env.id for env in suite.envs] == ["Guess-v0", "Guess-v1", GUESS]


ONE = f'[[env]]\nid = "{GUESS}"\n[[model]]\nmodel = "expert"\n'


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "a benchmark needs environments"),
        (f'[[env]]\nid = "{GUESS}"\n', "a benchmark needs policies"),
        ('[[env]]\nid = "Gues-v0"\n[[model]]\nmodel = "expert"\n', "no environment `Gues-v0`.* Did you mean"),
        ('[[env]]\nid = "No-*"\n[[model]]\nmodel = "expert"\n', "no environment `No-"),
        ('[[env]]\nname = "x"\n[[model]]\nmodel = "expert"\n', "has an `id`"),
        (f'{ONE}[[env]]\nid = "{GUESS}"\n', "two environments are called"),
        (f'{ONE}[[model]]\nmodel = "expert"\n', "two models are called `expert`"),
        (f'[[env]]\nid = "{GUESS}"\n[[model]]\nmodel = "exprt"\n', "no model directory exprt. Did you mean"),
        (
            f'[[env]]\nid = "{GUESS}"\n[[model]]\nmodel = "http://127.0.0.1:9/v1"\n',
            "write NAME@http://127.0.0.1:9/v1",
        ),
        (f"{ONE}[prices.exprt]\nprompt = 1\ncompletion = 1\n", "no model `exprt`. Did you mean `expert`"),
        (f"{ONE}[defaults]\nnn = 1\n", r"\[defaults\]: unknown setting `nn`"),
        (f'{ONE}[defaults]\noutput_dir = "x"\n', "unknown setting `output_dir`"),
        (f"{ONE}[defaults]\nn = 0\n", "`eval.n` = 0 does not fit"),
        (f'[[env]]\nid = "{GUESS}"\nengine = "sglang"\n[[model]]\nmodel = "expert"\n', r"to \[\[model\]\]"),
        (f'[[env]]\nid = "{GUESS}"\n[[model]]\nmodel = "expert"\nn = 3\n', r"move it to \[\[env\]\]"),
        (f'[[env]]\nid = "{GUESS}"\n[[model]]\nmodel = "expert"\nmax_slots = 3\n', "max_slots has no effect"),
        (
            f'[[env]]\nid = "{GUESS}"\ninput_key = "q"\n[[model]]\nmodel = "expert"\n',
            "input_key has no effect without prompt_data",
        ),
        ('[[env]]\nid = "Guess-*"\nname = "x"\n[[model]]\nmodel = "expert"\n', "drop 'x'"),
        (f"{ONE}[other]\nx = 1\n", "a suite has the tables"),
        ("[[env\n", "is not a TOML file"),
    ],
)
def test_a_mistake_in_a_suite_is_one_sentence(tmp_path, text, sentence):
    with pytest.raises(UserError, match=sentence):
        read(tmp_path, text)


@pytest.mark.parametrize("setting", [{"temperature": "0.3"}, {"max_slots": "3"}, {"openai_attempts": "3"}])
def test_a_flag_without_effect_on_any_cell_is_refused_by_its_name(tmp_path, setting):
    (name,) = setting
    with pytest.raises(UserError, match=f"the settings given: {name} has no effect"):
        read(tmp_path, ONE, **setting)


def test_prices_are_a_table_for_each_model(tmp_path):
    prices = json.loads('{"expert": {"prompt": 1.0, "completion": 4.0}}')
    (price,) = read(tmp_path, ONE, prices=prices).prices.values()
    assert price.as_prices().cached == 1.0
    with pytest.raises(UserError, match="--prices: Field required"):
        read(tmp_path, ONE, prices={"expert": {"prompt": 1.0}})
