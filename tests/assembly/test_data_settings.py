"""The settings of data, as files and flags give them."""

from __future__ import annotations

from pathlib import Path

import pytest
import tomli_w

from agentrl.assembly.config import RunConfig, SftConfig
from agentrl.assembly.data import RunData
from agentrl.assembly.load import listed_inactive, load_config
from agentrl.config import by_section, parse, read_toml, write_toml
from agentrl.envs import find
from agentrl.errors import ConfigError
from tests.assembly.test_every_setting import config_of
from tests.data.files import write_lines


@pytest.mark.parametrize(
    ("settings", "same"),
    [
        ({"apply_chat_template": True}, {"dialect": "chat"}),
        ({"apply_chat_template": False}, {}),
        ({"prompt_data": "x", "prompt_key": "question"}, {"prompt_data": "x", "input_key": "question"}),
        ({"prompt_data": '{"x": 2}'}, {"prompt_data": {"x": 2.0}}),
        ({"prompt_data": '["x", "y"]'}, {"prompt_data": ("x", "y")}),
    ],
)
def test_what_data_is_called_elsewhere_is_the_setting_that_it_stands_for(settings, same):
    assert config_of(settings) == config_of(same)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"prompt_data": '{"x": 0}'}, "the weight of 'x' is 0, not a number above 0"),
        ({"prompt_data": "[3]"}, "[3] is no path, no list of paths and no table of path and weight"),
        ({"eval_prompt_data": 3}, "3 is no path"),
        ({"prompt_data": "[x"}, "'[x' is neither a path nor JSON"),
        ({"rollout_max_prompt_len": 0}, "rollout_max_prompt_len"),
    ],
)
def test_a_mistake_in_data_is_one_sentence(settings, says):
    with pytest.raises(ConfigError) as caught:
        config_of(settings)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


PROMPTS = str(Path(__file__).parents[1] / "flow" / "prompts.jsonl")
ROWS = 12
IN_FILE = {"num_epoch": 3, "prompt_data": PROMPTS}
COUNTED, NO_FILE = "with num_rollout, which counts iterations", "without one file of prompt_data"


@pytest.mark.parametrize(
    ("settings", "iterations"),
    [
        ({"rollout_batch_size": 4}, 9),
        ({"rollout_batch_size": 5}, 8),
        ({"num_epoch": 1}, 1),
        ({"prompt_data": f"{PROMPTS}@[:3]", "rollout_batch_size": 1}, 9),
        ({"global_batch_size": 8, "n_samples_per_prompt": 4, "num_steps_per_rollout": 3}, 6),
        ({"num_rollout": 7}, 7),
        ({"num_rollout": 0}, 0),
    ],
)
def test_iterations_follow_from_epochs_unless_they_are_set(tmp_path, settings, iterations):
    """Of a file that serves SFT as well; the rest of the batch identity is set on the command line."""
    assert len(Path(PROMPTS).read_text().splitlines()) == ROWS
    path = tmp_path / "run.toml"
    path.write_text(tomli_w.dumps(by_section(RunConfig, {**IN_FILE, "rollout_batch_size": 32})))
    if "global_batch_size" in settings:
        path.write_text(tomli_w.dumps(by_section(RunConfig, IN_FILE)))
    config = load_config(path, settings)
    assert config.rollout.num_rollout == iterations
    listed = [line for line in listed_inactive(config) if "num_epoch" in line]
    assert bool(listed) == ("num_rollout" in settings)
    # What is written is the number: the run that goes on has it, whatever becomes of the file.
    write_toml(config, tmp_path / "config.toml")
    again = parse(RunConfig, read_toml(tmp_path / "config.toml"), source="x")
    assert (again, again.rollout.num_rollout) == (config, iterations)
    assert load_config(path, {}, SftConfig).sft.num_epoch == 3


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({}, NO_FILE),
        ({"prompt_data": [PROMPTS, PROMPTS]}, NO_FILE),
        (
            {"prompt_data": PROMPTS, "data_source_path": "x:y"},
            "prompt_data has no effect with data_source_path",
        ),
        ({"data_source_path": "x:y"}, NO_FILE),
        ({"prompt_data": PROMPTS, "num_rollout": 3}, COUNTED),
    ],
)
def test_epochs_that_count_nothing_are_refused(settings, reason):
    with pytest.raises(ConfigError, match=reason):
        load_config(None, {**settings, "num_epoch": 2})


def test_a_run_file_for_sft_may_have_epochs_that_rl_does_not_count(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text("[sft]\nnum_epoch = 2\n")
    config = load_config(path, {})
    assert config.rollout.num_rollout == RunConfig().rollout.num_rollout
    assert any("num_epoch" in line and NO_FILE in line for line in listed_inactive(config))


@pytest.mark.parametrize("answers", [(None, None), (None, "4")])
def test_a_run_says_that_no_row_has_an_answer(tmp_path, answers):
    rows = [{"question": "2 + 2?", "answer": answer} for answer in answers]
    path = write_lines(tmp_path / "a.jsonl", rows)
    config = config_of({"prompt_data": str(path), "input_key": "question", "label_key": "answer"})
    said = []
    RunData.of(config, find("SingleTurn-v0").make(), said.append)
    assert any("no row has an answer in `answer`" in line for line in said) == (answers == (None, None))
