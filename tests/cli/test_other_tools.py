"""Settings of other tools are settings here, or answered: each with what to do in place of it."""

from __future__ import annotations

from pathlib import Path

import pytest

import agentrl
from agentrl.assembly.config import RunConfig
from agentrl.cli import main
from agentrl.cli.train import train_command
from agentrl.config import leaves, others_of, parse, spellings
from agentrl.errors import ConfigError
from tests.flow.test_bad_input import complaint

OTHERS = others_of(RunConfig)
FLAGS = Path(__file__).with_name("flags_of_slime.txt").read_text().split()


def test_every_flag_that_scripts_of_slime_have_is_one_here_or_answered():
    own = {option for parameter in train_command.params for option in parameter.opts}
    unknown = [name for name in FLAGS if f"--{name.replace('_', '-')}" not in own and name not in OTHERS]
    assert len(FLAGS) > 250
    assert not unknown


def test_no_answer_stands_in_the_way_of_a_setting():
    # Of SFT alone: it has no flag where RL is meant.
    own = leaves(RunConfig).keys() | spellings(RunConfig).keys()
    assert not OTHERS.keys() & own
    for name, text in OTHERS.items():
        assert text[0].islower() or text.startswith(("Weights", "Megatron", "TensorBoard", "`")), name
        assert text.endswith("."), name


@pytest.mark.parametrize("command", ["train", "rollout"])
def test_all_flags_of_a_script_are_answered_at_once(command, capsys):
    words = [
        command,
        "--load",
        "x",
        "--lr",
        "1e-6",
        "--save=y",
        "--use-dynamic-batch-size",
        "--sglang-config",
        "z",
    ]
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith("agentrl: 4 flags are of other tools; in place of each:")
    assert [line.split(":")[0].strip() for line in said.splitlines()[1:]] == [
        *("--load", "--save", "--use-dynamic-batch-size", "--sglang-config")
    ]
    assert "output_dir/name" in said
    assert complaint(capsys, command, "--learning-rate", "1") == (
        f"agentrl: --learning-rate is a flag of other tools: {OTHERS['learning_rate']}"
    )


def test_keys_of_files_and_keywords_are_answered_too():
    with pytest.raises(ConfigError, match=r"^unknown setting `num_generations`: n_samples_per_prompt is"):
        agentrl.train(num_generations=8)
    with pytest.raises(ConfigError, match=r"^run.toml: unknown key `trainer.fp16`: bf16 multiplies"):
        parse(RunConfig, {"trainer": {"fp16": True}}, source="run.toml")


def test_settings_are_searched_for_what_others_call_them(capsys):
    main(["settings", "--balance-data"])
    shown = capsys.readouterr().out
    assert "[of other tools]" in shown
    assert OTHERS["balance_data"] in " ".join(shown.split())
