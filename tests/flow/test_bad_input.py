"""Bad input is one sentence that names the value and the next move, exit code 2, no traceback."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest

from agentrl.cli import main
from agentrl.rendering.fresh_tokenizer import train_tokenizer
from tests.flow.runs import TINY

ROOT = Path(__file__).parents[2]
# Inline: most of the time of a run that ends with an error would be the start of its processes.
SMALL = [*(f"--{name.replace('_', '-')}={value}" for name, value in TINY.items()), "--inline"]
BANDIT = "--env=tests.flow.worlds:Bandit"


class Case(NamedTuple):
    """A command line, and what its one sentence must say."""

    arguments: tuple[str, ...]
    fragments: tuple[str, ...]
    run_file: str = ""


def world(name, *more):
    return ("train", f"--env=tests.flow.worlds:{name}", "--num-rollout=1", *SMALL, *more)


USUAL = {
    "unknown key": Case(
        ("train", "run.toml"),
        ("run.toml", "`rollout.n_sample_per_prompt`", "Did you mean `n_samples_per_prompt`?"),
        "[rollout]\nn_sample_per_prompt = 4\n",
    ),
    "wrong type": Case(
        ("train", "run.toml"), ("run.toml", "`trainer.lr`", "'fast'", "number"), '[trainer]\nlr = "fast"\n'
    ),
    "batch identity": Case(
        ("train", "run.toml"),
        ("rollout_batch_size (32) x n_samples_per_prompt (8) = 256", "global_batch_size (100)", "change one"),
        "[rollout]\nrollout_batch_size = 32\nn_samples_per_prompt = 8\nglobal_batch_size = 100\n",
    ),
    "unknown environment": Case(
        ("train", "--env=HopSerch-v0"), ("`HopSerch-v0`", "Did you mean `HopSearch-v0`?")
    ),
    "missing model": Case(("eval", "HopSearch-v0", "--model=nowhere"), ("nowhere", "config.json")),
    "broken model": Case(("eval", "HopSearch-v0", "--model=torn"), ("torn", "cannot be loaded")),
    "run that exists": Case(
        ("train", BANDIT, "--output-dir=.", "--name=taken"), ("taken", "already holds a run", "--name")
    ),
    "group of one": Case(
        ("train", "--n-samples-per-prompt=1"), ("n_samples_per_prompt = 1", "grpo", "at least 2")
    ),
    "untyped tool": Case(world("Untyped"), ("`press_untyped`", "`button`", "no type hint", "`button: str`")),
    "broken reset": Case(world("Dead"), ("reset failed", "no such planet", "mend the environment")),
    "reward NaN": Case(world("Undefined", "--warm-start-steps=1"), ("reward", "nan", "finite number")),
}


def command(arguments, folder):
    started = [str(Path(sys.executable).with_name("agentrl")), *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    return subprocess.run(
        started, cwd=folder, env=environment, capture_output=True, text=True, timeout=120, check=False
    )


def prepare(folder, case):
    folder.mkdir()
    if case.run_file:
        (folder / "run.toml").write_text(case.run_file)
    (folder / "taken").mkdir()
    (folder / "taken" / "metrics.jsonl").write_text("")
    (folder / "torn").mkdir()
    (folder / "torn" / "config.json").write_text('{"model_type": "qwen3"')


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """Every case as a real process, two at a time."""
    place = tmp_path_factory.mktemp("bad")

    def run(name):
        folder = place / name.replace(" ", "-")
        prepare(folder, USUAL[name])
        return command(USUAL[name].arguments, folder)

    with ThreadPoolExecutor(2) as pool:
        return dict(zip(USUAL, pool.map(run, USUAL), strict=True))


@pytest.mark.parametrize("name", USUAL)
def test_a_mistake_that_users_make_is_one_sentence(tmp_path, monkeypatch, capfd, name):
    prepare(tmp_path / "here", USUAL[name])
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("COLUMNS", "200")
    output = complaint(capfd, *USUAL[name].arguments)
    check_sentence(output, USUAL[name].fragments)


@pytest.mark.full
@pytest.mark.parametrize("name", USUAL)
def test_a_real_process_ends_with_one_sentence_and_exit_code_2(ended, name):
    process = ended[name]
    assert process.returncode == 2, process.stderr
    assert "Traceback" not in process.stdout + process.stderr
    check_sentence(process.stderr, USUAL[name].fragments)


def check_sentence(stderr, fragments):
    lines = stderr.strip().splitlines()
    assert len(lines) == 1, stderr
    assert lines[0].startswith("agentrl: ")
    for part in fragments:
        assert part in lines[0]


def torn(folder, **changed):
    """A model directory that was saved whole, with some files changed or (None) taken away."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    tokenizer = train_tokenizer(["a"], special_tokens=(), vocab_size=300)
    shape = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "head_dim": 16}
    torch.manual_seed(0)
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": len(tokenizer)}
    Qwen3ForCausalLM(Qwen3Config(**shape, **heads)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    for name, change in changed.items():
        path = folder / {"config": "config.json", "weights": "model.safetensors"}.get(name, name)
        if change is None:
            path.unlink()
        else:
            path.write_bytes(change(path.read_bytes()))
    return folder


def other_shape(text):
    return json.dumps({**json.loads(text), "hidden_size": 48}).encode()


def other_architecture(text):
    return json.dumps({"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}).encode()


def without_one_tensor(data):
    """A safetensors file in which one tensor has another name: it opens, but something is missing."""
    assert data.count(b"model.norm.weight") == 1
    return data.replace(b"model.norm.weight", b"model.morn.weight")


def other_layers(text):
    return json.dumps({**json.loads(text), "num_hidden_layers": 3}).encode()


@pytest.mark.parametrize(
    "changed",
    [
        pytest.param({"weights": None}, id="no weights"),
        pytest.param({"weights": lambda data: data[: len(data) // 2]}, id="half the weights"),
        pytest.param({"weights": lambda data: b""}, id="empty weights"),
        pytest.param({"weights": without_one_tensor}, id="one tensor missing"),
        pytest.param({"config": lambda data: b"not json"}, id="no json"),
        pytest.param({"config": lambda data: b"[]"}, id="a list"),
        pytest.param({"config": lambda data: b'{"model_type": "nobody-knows"}'}, id="unknown type"),
        pytest.param({"config": other_shape}, id="other shape"),
        pytest.param({"config": other_layers}, id="other layers"),
        pytest.param({"config": other_architecture}, id="other architecture"),
        pytest.param({"tokenizer.json": None, "tokenizer_config.json": None}, id="no tokenizer"),
        pytest.param({"tokenizer.json": lambda data: b"{"}, id="broken tokenizer"),
    ],
)
def test_a_broken_model_directory_is_one_sentence(tmp_path, changed, capfd):
    folder = torn(tmp_path / "model", **changed)
    capfd.readouterr()
    output = complaint(capfd, "eval", "tests.flow.worlds:Bandit", "--model", str(folder), "--n=2", "--json")
    assert "model" in output


def test_the_same_model_directory_whole_is_no_bad_input(tmp_path, capfd):
    folder = torn(tmp_path / "model")
    capfd.readouterr()
    main(["eval", "tests.flow.worlds:Bandit", "--model", str(folder), "--n=2", "--json"])
    assert json.loads(capfd.readouterr().out)["n"] == 2


def complaint(capfd, *arguments):
    """The one sentence that a command ends with."""
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    output = capfd.readouterr().err
    assert ended.value.code == 2, output
    assert "Traceback" not in output
    check_sentence(output, ())
    return output.strip()


@pytest.mark.parametrize(
    ("arguments", "fragment"),
    [
        (("train", "nowhere.toml"), "there is no run file nowhere.toml"),
        (("train", "--n-sample-per-prompt=4"), "--n-samples-per-prompt"),
        (("train", "--lr=fast"), "`trainer.lr` = 'fast'"),
        (("train", "--lr=-1"), "`trainer.lr` = '-1'"),
        (("train", "--lr=nan"), "`trainer.lr` = 'nan'"),
        (("train", "--num-rollout=1.5"), "`rollout.num_rollout` = '1.5'"),
        (("train", "--optimizer=sgd"), "'adamw' or 'muon'"),
        (("train", "--advantage-estimator=gppo"), "advantage_estimator"),
        (("train", "--env-kwargs={"), "--env-kwargs takes a JSON object"),
        (("train", "--env-kwargs=[1]"), "--env-kwargs takes a JSON object"),
        (("train", BANDIT, '--env-kwargs={"colour": 1}'), "no argument `colour`"),
        (("train", "--name=../elsewhere"), "`run.name` = '../elsewhere'"),
        (("train", "--env=nowhere.at_all:World"), "name it `package.module:Class`"),
        (("eval", "HopSearch-v0", "--model=nowhere", "--n=0"), "n"),
        (("eval", "HopSearch-v0", "--model=nowhere", "--temperature=-1"), "temperature"),
        (("eval", "HopSearch-v0"), "--model"),
        (("envs", "show", "HopSerch-v0"), "Did you mean `HopSearch-v0`?"),
        (("envs", "shwo"), "shwo"),
        (("trian",), "trian"),
        (("train", BANDIT, "--vocab-size=100", "--output-dir=here"), "vocab_size"),
        (("train", BANDIT, "--num-query-groups=3", "--output-dir=here"), "num_query_groups"),
        (("train", BANDIT, "--kv-channels=15", "--output-dir=here"), "kv_channels"),
        (("train", BANDIT, "--train-split=", *SMALL, "--output-dir=file"), "file"),
        (("train", "--env=tests.flow.worlds:Bookless", *SMALL, "--warm-start-steps=1"), "expert"),
        (("train", "--env=tests.flow.worlds:Spelled", *SMALL), "`corpus` returned 'press left right gold"),
        (("train", "--env=HopSearch-v0", "--train-split=nope", *SMALL, "--eval-split=demo"), "nope"),
        (("train", "--env=HopSearch-v0", "--eval-split=nope", *SMALL), "nope"),
        (("train", BANDIT, *SMALL, "--max-context-len=10", "--num-rollout=1"), "max_context_len"),
        (("train", "--env=tests.flow.worlds:Endless", *SMALL, "--num-rollout=1"), "sets no limit of tokens"),
        (("train", BANDIT, *SMALL, "--dialect=chatt"), "'own', 'inline' or 'chat'"),
        (("train", BANDIT, *SMALL, "--dialect=chat", "--chat-format=qwen33"), "Did you mean `qwen3`?"),
        (
            ("train", BANDIT, *SMALL, "--dialect=chat", "--chat-format=llama-3"),
            "does not fit the chat format",
        ),
        (("train", BANDIT, *SMALL, "--dialect=chat", "--num-rollout=1"), "raise rollout_max_context_len"),
    ],
)
def test_a_mistake_is_one_sentence(tmp_path, monkeypatch, capfd, arguments, fragment):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(ROOT)
    (tmp_path / "file").write_text("")
    assert fragment in complaint(capfd, *arguments)


@pytest.mark.parametrize(
    "content", ["[rollout", "rollout = 3", "[rollout]\nlr = 1.0", "[rolout]\n", "lr = 1.0"]
)
def test_a_broken_run_file_is_one_sentence_that_names_it(tmp_path, capfd, content):
    path = tmp_path / "run.toml"
    path.write_text(content)
    assert "run.toml" in complaint(capfd, "train", str(path))


def test_a_mistake_leaves_no_run_folder_in_the_way_of_the_next_try(tmp_path, capfd):
    arguments = ["train", "--env=tests.flow.worlds:Untyped", f"--output-dir={tmp_path}", "--name=x"]
    first = complaint(capfd, *arguments)
    assert complaint(capfd, *arguments) == first


@pytest.mark.full
def test_a_world_in_the_current_folder_can_be_named(tmp_path):
    (tmp_path / "my_world.py").write_text("from tests.flow.worlds import Untyped as World\n")
    process = command(("train", "--env=my_world:World"), tmp_path)
    assert process.returncode == 2
    check_sentence(process.stderr, ("no type hint",))
