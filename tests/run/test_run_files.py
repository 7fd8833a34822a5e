"""Every run file of the repository is dry-run, and does what its first lines say.

Models are folders of the published sizes, whose weights are holes in a file; data are rows in the form that
is published.
"""

from __future__ import annotations

import json
import math
import re
import runpy
import shutil
import struct
import sys
from collections import namedtuple
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoConfig

from agentrl.algorithms.estimator_choice import GrpoConfig
from agentrl.assembly.config import RunConfig
from agentrl.assembly.load import load_config
from agentrl.assembly.speed import Work, trainer_speed
from agentrl.cli.flags import flag_values
from agentrl.cli.recipes import FOLDER
from agentrl.cli.train import train_command
from agentrl.config import leaves, spellings
from agentrl.run.dry_run import dry_run
from agentrl.run.dry_run_memory import OPTIMIZERS, PUBLISHED
from agentrl.weights.hf.tensors import tensor_shapes
from envs_contrib.search_r1.protocol import PROMPT
from tests.cards import H200_MIB, with_cards
from tests.engine.sglang_launch.starting import STAND_IN
from tests.envs.gateway.boxes import PACKAGES
from tests.house.source import ROOT
from tests.rendering.real_templates import template
from tests.rendering.subjects import CHATML, GLM, LLAMA, tokenizer
from tests.sizes import DEEPSEEK_V3, GLM45_AIR, QWEN3_30B_A3B

RECIPES = str(FOLDER.relative_to(ROOT))
FILES = {
    str(path.relative_to(ROOT)): path
    for path in (*sorted((ROOT / "examples").rglob("*.toml")), *sorted(FOLDER.glob("*.toml")))
    # That of a benchmark.
    if path.name != "suite.toml"
}
FRAMEWORK = "examples/framework_agent/run.toml"
COMMON = {
    "hidden_act": "silu",
    "num_hidden_layers": 36,
    "vocab_size": 151936,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
}
QWEN25_3B = COMMON | {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 2048,
    "intermediate_size": 11008,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32768,
}
QWEN25_1_5B = QWEN25_3B | {
    "num_hidden_layers": 28,
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_attention_heads": 12,
}
QWEN25_0_5B = QWEN25_3B | {
    "num_hidden_layers": 24,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_attention_heads": 14,
}
SMOLLM2 = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "vocab_size": 49152,
    "tie_word_embeddings": True,
}
LLAMA31_8B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-05,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "factor": 8.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
}
GLM_Z1_9B = {
    "architectures": ["Glm4ForCausalLM"],
    "model_type": "glm4",
    "attention_bias": True,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 13696,
    "num_hidden_layers": 40,
    "num_attention_heads": 32,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32768,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 151552,
}
QWEN3_4B = COMMON | {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
}
DEEPSEEK = (
    "<｜begin▁of▁sentence｜>",
    "<｜end▁of▁sentence｜>",
    "<｜User｜>",
    "<｜Assistant｜>",
    "<think>",
    "</think>",
)
MOST_OF_A_FILE = 4 << 30
_Disk = namedtuple("_Disk", "total used free")
QUESTION = {
    "prompt": [{"role": "user", "content": PROMPT.replace("{question}", "who wrote faust?")}],
    "reward_model": {"ground_truth": {"target": ["Goethe"]}, "style": "rule"},
}
PROBLEM = {
    "prompt": [
        {
            "role": "user",
            "content": "Solve the following math problem step by step. The last line of your response should "
            "be of the form Answer: $Answer (without quotes) where $Answer is the answer to the problem."
            '\n\nWhat is 17 times 2?\n\nRemember to put your answer on its own line after "Answer:".',
        }
    ],
    "reward_model": {"ground_truth": "34", "style": "rule-lighteval/MATH_v2"},
}

WORD_PROBLEM = {
    "question": "Two boxes hold 12 eggs each. How many eggs are there?",
    "answer": "There are 2*12 = <<2*12=24>>24 eggs.\n#### 24",
}


def write_model(
    folder: Path, config: dict, chat_template: str | None = None, special=CHATML, end="<|im_end|>"
) -> None:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    tokenizer("byte-level", special, end, chat_template).save_pretrained(folder)
    # As published: no file is larger than a process may map at once.
    files: list[dict[str, tuple[int, ...]]] = [{}]
    size = 0
    for name, shape in tensor_shapes(AutoConfig.from_pretrained(folder)).items():
        if size > MOST_OF_A_FILE:
            files.append({})
            size = 0
        files[-1][name] = shape
        size += 2 * math.prod(shape)
    names = [f"model-{number:05}.safetensors" for number in range(len(files))]
    for name, shapes in zip(names, files, strict=True):
        write_holes(folder / name, shapes)
    index = {tensor: name for name, shapes in zip(names, files, strict=True) for tensor in shapes}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))


def write_holes(path: Path, shapes: dict[str, tuple[int, ...]]) -> None:
    header, end = {}, 0
    for name, shape in shapes.items():
        size = 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)


def write_rows(path: Path, row: dict) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist([row] * 5), path)


def prepare(folder: Path) -> None:
    """What the run files need, by the paths in their first lines."""
    write_model(folder / "models" / "Qwen3-4B", QWEN3_4B, template("qwen3"))
    write_model(folder / "models" / "Qwen2.5-3B", QWEN25_3B)
    write_model(
        folder / "models" / "Llama-3.1-8B-Instruct", LLAMA31_8B, template("llama3_1"), LLAMA, "<|eot_id|>"
    )
    # Its own template is in no package; this one is of a later model of the family.
    write_model(folder / "models" / "GLM-Z1-9B-0414", GLM_Z1_9B, template("glm4moe"), GLM, "<|endoftext|>")
    write_model(folder / "models" / "Qwen3-30B-A3B", QWEN3_30B_A3B, template("qwen3"))
    write_model(folder / "models" / "GLM-4.5-Air", GLM45_AIR, template("glm4moe"), GLM, "<|endoftext|>")
    distilled = template("deepseek_r1_distill")  # its own is in no package; this one has the same markers
    write_model(folder / "models" / "DeepSeek-R1-bf16", DEEPSEEK_V3, distilled, DEEPSEEK, DEEPSEEK[1])
    # Its own template is of this form, too.
    write_model(folder / "models" / "smollm2", SMOLLM2, template("qwen2_5"))
    write_model(folder / "models" / "Qwen2.5-1.5B-Instruct", QWEN25_1_5B, template("qwen2_5"))
    write_model(folder / "models" / "Qwen2.5-Coder-3B-Instruct", QWEN25_3B, template("qwen2_5"))
    write_model(folder / "models" / "Qwen2.5-0.5B-Instruct", QWEN25_0_5B, template("qwen2_5"))
    for split in ("train", "test"):
        write_rows(folder / "data" / "gsm8k" / f"{split}.parquet", WORD_PROBLEM)
    for split in ("train", "test"):
        write_rows(folder / "data" / "nq_search" / f"{split}.parquet", QUESTION)
    for name in ("dapo-math-17k", "aime-2024"):
        write_rows(folder / "data" / f"{name}.parquet", PROBLEM)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    folder = tmp_path_factory.mktemp("prepared")
    prepare(folder)
    shutil.copytree(ROOT / "examples", folder / "examples")
    runpy.run_path(str(folder / "examples" / "eval_multi_task" / "write_data.py"), run_name="__main__")
    shutil.copytree(FOLDER, folder / RECIPES)
    return folder


@pytest.fixture
def cards(prepared, tmp_path, monkeypatch):
    """Makes a machine with cards, and what stands in for an SGLang; returns the settings that name it."""

    def made(number, mib=H200_MIB):
        monkeypatch.setenv("PATH", with_cards(tmp_path / "bin", number, mib=mib))
        monkeypatch.setattr(torch.cuda, "device_count", lambda: number)
        # Not the interpreter of the tests itself, so that it is asked for its SGLang.
        return {"sglang_python": str(Path(sys.executable).with_name("python3"))}

    monkeypatch.chdir(prepared)
    monkeypatch.setenv("PYTHONPATH", str(STAND_IN))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: _Disk(10**13, 0, 10**13))
    monkeypatch.setattr("agentrl.run.dry_run_memory.machine_memory", lambda: 10**12)
    return made


@pytest.fixture
def eight_cards(cards):
    """A machine with eight cards."""
    return cards(8)


def test_all_of_them_are_found():
    assert len(FILES) >= 10
    assert {"examples/hop_search/run.toml", f"{RECIPES}/retool-qwen3-4b.toml"} <= FILES.keys()


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.full) if n == FRAMEWORK else n for n in FILES]
)
def test_a_run_file_is_valid(name, prepared, monkeypatch):
    monkeypatch.chdir(prepared)
    if name == FRAMEWORK:
        monkeypatch.setattr(sys, "path", [*sys.path, str(PACKAGES)])
    facts = dry_run(Path(name), {}).as_json()
    assert facts["run"]["iterations"] > 0
    assert facts["prompts"]["training"] > 0
    assert facts["prompts"]["longest"] > 0
    of_gpus = facts["gpus"]["of_the_trainer"] + facts["gpus"]["of_servers"] if "gpus" in facts else 0
    # What is missing is missing on this machine alone: its cards, an installation, a disk.
    assert bool(facts["missing"]) <= bool(of_gpus)


def holders(cards, name):
    return [card for card, whose in cards.items() if any(holder.startswith(name) for holder in whose)]


def test_of_eight_gpus_four_train_and_four_sample(eight_cards):
    first = FILES[f"{RECIPES}/retool-qwen3-4b.toml"].read_text().splitlines()[0]
    assert "eight GPUs: four train (Megatron), four sample (SGLang)" in first
    facts = dry_run(Path(f"{RECIPES}/retool-qwen3-4b.toml"), eight_cards).as_json()
    assert facts["model"]["parameters"]["total"] == pytest.approx(4.02e9, rel=0.001)
    assert holders(facts["cards"], "rank") == [f"GPU {n}" for n in range(4)]
    assert holders(facts["cards"], "policy server") == [f"GPU {n}" for n in range(4, 8)]
    assert not any("share" in note for note in facts["notes"])


IN_TURNS = {
    "search-r1-qwen2.5-3b": ("SGLang and Megatron take turns on the same GPUs", 3.09e9),
    "math-qwen3-4b": ("SGLang and Megatron take turns on all of them", 4.02e9),
    "math-llama3.1-8b": ("SGLang and Megatron take turns on all of them", 8.03e9),
}


@pytest.mark.parametrize("name", IN_TURNS)
def test_of_eight_gpus_all_train_and_all_sample_in_turns(name, cards):
    path, (says, size) = f"{RECIPES}/{name}.toml", IN_TURNS[name]
    assert says in FILES[path].read_text().splitlines()[0]
    # Cards of 80 GB, with a server's share in use.
    facts = dry_run(Path(path), cards(8, mib=80_000)).as_json()
    assert facts["model"]["parameters"]["total"] == pytest.approx(size, rel=0.002)
    everyone = [f"GPU {n}" for n in range(8)]
    assert holders(facts["cards"], "rank") == holders(facts["cards"], "policy server") == everyone
    assert not facts["missing"]


def test_of_eight_gpus_four_train_glm_and_four_sample(cards):
    path = f"{RECIPES}/math-glm4-9b.toml"
    assert "four train (Megatron), four sample (SGLang)" in FILES[path].read_text().splitlines()[0]
    facts = dry_run(Path(path), cards(8, mib=80_000)).as_json()
    assert facts["model"]["parameters"]["total"] == pytest.approx(9.4e9, rel=0.01)
    assert holders(facts["cards"], "rank") == [f"GPU {n}" for n in range(4)]
    assert holders(facts["cards"], "policy server") == [f"GPU {n}" for n in range(4, 8)]
    assert not facts["missing"]


MIXTURES = {
    "math-qwen3-30b-a3b": ("one machine with eight GPUs", 30.5e9, 8),
    "math-glm4.5-air": ("two machines with eight GPUs each", 106.9e9, 16),
    "math-deepseek-r1": ("16 machines with eight GPUs each", 671e9, 128),
}


def training_s(path: str, length: int) -> float:
    """A step of the run file, whose samples all have so many tokens (seconds)."""
    config = load_config(path, {})
    policy = AutoConfig.from_pretrained(config.model.hf_checkpoint)
    steps, row = config.rollout.num_steps_per_rollout, config.trainer.max_tokens_per_gpu
    samples = config.rollout.rollout_batch_size * config.rollout.n_samples_per_prompt
    rows = samples * length / row / config.layout.data_parallel_size / steps
    offloads = config.trainer.optimizer_cpu_offload
    speed = trainer_speed(policy, config.layout, Work(rows, row, length), offloads=offloads)
    scoring = speed.forward if config.algorithm.has_penalty else 0.0
    return steps * (rows * (scoring + speed.learn) + speed.step)


def said_in(name: str) -> tuple[float, int]:
    """What a recipe says of its training: the seconds of a step, and for samples of how many tokens."""
    text = " ".join(line.strip("# ") for line in FILES[name].read_text().splitlines())
    seconds, length = re.search(r"about (\d+) s a step, for samples of ([\d,]+) tokens", text).groups()
    return float(seconds), int(length.replace(",", ""))


@pytest.mark.parametrize("name", [name for name in FILES if name.startswith(RECIPES)])
def test_a_recipe_says_how_long_its_training_takes(name, prepared, monkeypatch):
    monkeypatch.chdir(prepared)
    seconds, length = said_in(name)
    assert seconds == pytest.approx(training_s(name, length), rel=0.05)


@pytest.mark.parametrize("name", MIXTURES)
def test_a_mixture_fits_on_the_machines_that_its_first_line_names(name, prepared, monkeypatch):
    monkeypatch.chdir(prepared)
    path, (says, size, gpus) = f"{RECIPES}/{name}.toml", MIXTURES[name]
    text = FILES[path].read_text()
    assert says in text.splitlines()[0]
    facts = dry_run(Path(path), {}).as_json()
    assert facts["model"]["parameters"]["total"] == pytest.approx(size, rel=0.002)
    assert facts["gpus"]["of_the_trainer"] == facts["gpus"]["of_servers"] == gpus
    memory = facts["memory"]
    rank, server = (
        next(part for of, part in memory.items() if of.startswith(who)) for who in ("trainer, each", "server")
    )
    # They take turns, and each keeps what the other one cannot have.
    assert rank["total_bytes"] + server["runtime_bytes"] < 0.95 * 80e9
    assert server["total_bytes"] < 0.95 * 80e9
    assert "80 GB are enough for a GPU" in text
    # The memory of a machine, and of the first: its optimizers, and what servers are sent.
    optimizers, published = (memory[of] for of in (OPTIMIZERS, PUBLISHED))
    said = [
        float(n) * {"GB": 1e9, "TB": 1e12}[unit] for n, unit in re.findall(r"([\d.]+) ([GT]B)(?=[,.])", text)
    ]
    of_all = optimizers["total_bytes"] + published["total_bytes"]
    assert min(said) > optimizers["total_bytes"]
    assert 1.4 * of_all > max(said) > of_all


# The arguments of slime's scripts at the commit that the recipes name, but for paths, and for what agentrl
# answers in place of them.
SLIME = """
    --rollout-shuffle --apply-chat-template --num-rollout 3000 --rollout-batch-size 32
    --n-samples-per-prompt 8 --rollout-max-response-len 8192 --rollout-temperature 1 --global-batch-size
    256 --eval-interval 20 --tensor-model-parallel-size 2 --sequence-parallel
    --pipeline-model-parallel-size 1 --recompute-granularity full --advantage-estimator grpo
    --entropy-coef 0.00 --eps-clip 0.2 --eps-clip-high 0.28 --optimizer adam --lr 1e-6 --lr-decay-style
    constant --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.98 --rollout-num-gpus-per-engine 2
    --save-interval 20
"""
OF_ONE = {
    "math-qwen3-4b": "--context-parallel-size 1 --max-tokens-per-gpu 9216 "
    "--colocate --actor-num-gpus-per-node 8",
    "math-glm4-9b": "--context-parallel-size 2 --max-tokens-per-gpu 4608 --actor-num-gpus-per-node 4",
    "math-qwen3-30b-a3b": "--tensor-model-parallel-size 4 --context-parallel-size 1 "
    "--max-tokens-per-gpu 20480 --expert-model-parallel-size 8 --expert-tensor-parallel-size 1 "
    "--optimizer-cpu-offload --colocate --actor-num-gpus-per-node 8 --rollout-num-gpus-per-engine 8",
    "math-deepseek-r1": "--rollout-batch-size 128 --num-steps-per-rollout 4 --over-sampling-batch-size 256 "
    "--rollout-max-response-len 32768 --tensor-model-parallel-size 8 --context-parallel-size 4 "
    "--pipeline-model-parallel-size 4 --decoder-last-pipeline-num-layers 13 --expert-model-parallel-size 32 "
    "--expert-tensor-parallel-size 1 --optimizer-cpu-offload --colocate --actor-num-nodes 16 "
    "--actor-num-gpus-per-node 8 --rollout-num-gpus-per-engine 64",
}


def with_changes(flags: str, changes: str) -> list[str]:
    """Flags with others in their place; steps of a rollout say what a global batch size would."""
    words = {line.split()[0]: line.split() for line in re.findall(r"--[^-]\S*(?: (?!--)\S+)*", flags)}
    words |= {line.split()[0]: line.split() for line in re.findall(r"--[^-]\S*(?: (?!--)\S+)*", changes)}
    if "--num-steps-per-rollout" in words:
        del words["--global-batch-size"]
    return [word for each in words.values() for word in each]


@pytest.mark.parametrize("name", OF_ONE)
def test_a_recipe_has_the_values_of_the_script_that_it_names(name):
    context = train_command.make_context("train", with_changes(" ".join(SLIME.split()), OF_ONE[name]))
    of_script = {
        key: context.params[key]
        for key in leaves(RunConfig).keys() | spellings(RunConfig).keys()
        if context.params.get(key) is not None
    }
    path = FILES[f"{RECIPES}/{name}.toml"]
    # What the script says changes nothing of the recipe.
    assert load_config(str(path), flag_values(of_script, RunConfig)) == load_config(str(path), {})
    aime = load_config(str(path), {}).eval.eval_prompt_data["aime"]
    expected = (8, 32768, 1.0) if "deepseek" in name else (16, 16384, 1.0)
    assert (aime.n_samples_per_eval_prompt, aime.max_response_len, aime.top_p) == expected


@pytest.mark.parametrize(("name", "gib", "size"), [("24gb", 24, 494e6), ("80gb", 80, 1.544e9)])
def test_rank_and_server_take_turns_on_one_card_where_each_fits(cards, name, gib, size):
    path = f"examples/one_gpu/{name}.toml"
    assert f"one card of {gib} GB" in FILES[path].read_text().splitlines()[0]
    facts = dry_run(Path(path), cards(1, mib=gib * 1000)).as_json()
    assert facts["model"]["parameters"]["total"] == pytest.approx(size, rel=0.001)
    assert holders(facts["cards"], "rank") == holders(facts["cards"], "policy server") == ["GPU 0"]
    assert facts["memory"]["trainer"]["total_bytes"] < gib * 1e9
    assert not facts["missing"]


def test_the_recipe_of_dapo_is_the_quickstart_with_two_filters_and_a_penalty():
    low, high = GrpoConfig().bounds
    parts = {
        "name": "quickstart-dapo",
        "dynamic_sampling_filter_path": "agentrl.algorithms.filters:zero_std",
        "rollout_sample_filter_path": "agentrl.algorithms.filters:truncated",
        "shaping_overlong_len": 40,
        "shaping_overlong_buffer_len": 8,
        # What it writes out is what grpo does anyway.
        **{"advantage_estimator": "grpo", "loss_weighting": GrpoConfig().own_weighting},
        **{"eps_clip": low, "eps_clip_high": high},
    }
    quickstart = load_config(str(FILES["examples/hop_search/run.toml"]), parts)
    assert load_config(str(FILES["examples/hop_search/dapo.toml"]), {}) == quickstart
