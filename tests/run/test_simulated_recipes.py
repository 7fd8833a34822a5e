"""Recipes of mixtures that nobody has run are simulated, with the training that their first lines say."""

from __future__ import annotations

import json

import pytest

from agentrl.assembly.load import load_config
from agentrl.cli import main
from tests.run.test_run_files import MIXTURES, RECIPES, prepared, said_in

__all__ = ["prepared"]


@pytest.mark.parametrize("name", MIXTURES)
def test_a_mixture_that_has_not_run_is_simulated_with_the_training_that_it_says(
    name, prepared, monkeypatch, capsys
):
    monkeypatch.chdir(prepared)
    path, (_, size, gpus) = f"{RECIPES}/{name}.toml", MIXTURES[name]
    seconds, length = said_in(path)
    lengths = {"turns": 1, "turn_len": length - 100, "prompt_len": 100}
    flags = [
        word
        for key, value in lengths.items()
        for end in ("", "_p95")
        for word in (f"--{key}{end}".replace("_", "-"), str(value))
    ]
    main(["simulate", path, *flags, "--iterations", "5", "--json"])
    result = json.loads(capsys.readouterr().out)
    model, rollout = result["model"], load_config(path, {}).rollout
    steps, samples = rollout.num_steps_per_rollout, rollout.prompts * rollout.n_samples_per_prompt
    training = samples * length / model["train_tok_per_s"] + steps * model["optimizer_step_s"]
    assert training == pytest.approx(seconds, rel=0.06)
    assert model["publish_s"] == pytest.approx(2 * size / 19.2e9, rel=0.01)
    assert model["colocate"]
    assert model["rollout_gpus"] + model["train_gpus"] == model["trainer_gpus"] == gpus
    assert result["rows"][0]["steps_per_s"] > 0


def test_a_simulation_says_what_has_predicted_its_numbers_and_flags_win(prepared, monkeypatch, capsys):
    monkeypatch.chdir(prepared)
    path = f"{RECIPES}/math-qwen3-30b-a3b.toml"
    main(["simulate", path, "--turns", "1", "--iterations", "5", "--train-tok-per-s", "7000"])
    said = capsys.readouterr().out
    assert "By the model of H100s behind `agentrl fit`: optimizer_step_s = " in said
    assert (
        "Of weights in bfloat16, at 19.2 GB/s as one small model on an H200 was sent: publish_s = 3.18."
        in said
    )
    assert "Of the run file: trainer_gpus = 8, " in said
    assert "nobody's machine" in said
