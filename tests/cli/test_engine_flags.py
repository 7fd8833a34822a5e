"""The own arguments of SGLang and of Megatron as flags."""

from __future__ import annotations

import json

import pytest

from agentrl.cli.evaluate import evaluate_command
from agentrl.cli.flags import flag_values
from agentrl.cli.train import train_command
from agentrl.evaluation.config import EvalConfig
from tests.flow.test_bad_input import complaint

WORDS = ["--sglang-page-size", "1", "--sglang-disable-cuda-graph", "--sglang-cuda-graph-bs", "1", "2"]
TABLE = {"page_size": "1", "disable_cuda_graph": True, "cuda_graph_bs": ["1", "2"]}


def table_of(command, words):
    return json.loads(command.make_context("it", words).params["sglang"])


def test_they_become_one_table():
    assert table_of(train_command, ["run.toml", "--engine", "sglang", *WORDS, "--seed", "3"]) == TABLE
    words = ["HopSearch-v0", "--sglang", '{"dtype": "bfloat16"}', "--sglang-dtype=float32", *WORDS]
    context = evaluate_command.make_context("eval", words)
    flags = {name: value for name, value in context.params.items() if name == "sglang"}
    assert flag_values(flags, EvalConfig) == {"sglang": {"dtype": "float32", **TABLE}}


def test_those_of_megatron_become_a_table_of_typed_values():
    words = ["--megatron-recompute-method", "uniform", "--megatron-recompute-num-layers", "2"]
    words += ["--megatron-batch-p2p-sync=False", "--megatron-fp32-residual-connection"]
    words += ["--megatron-recompute-modules", "mlp", "core_attn", "--sglang-page-size", "1", "--lr", "1"]
    params = train_command.make_context("train", words).params
    assert json.loads(params["megatron_config"]) == {
        "recompute_method": "uniform",
        "recompute_num_layers": 2,
        "batch_p2p_sync": False,
        "fp32_residual_connection": True,
        "recompute_modules": ["mlp", "core_attn"],
    }
    assert (json.loads(params["sglang"]), params["lr"]) == ({"page_size": "1"}, "1")


def test_those_of_the_router_become_a_table_of_words():
    words = ["--router-policy", "cache_aware", "--router-cache-threshold=0.5", "--router-dp-aware"]
    params = train_command.make_context("train", [*words, "--sglang-page-size", "1"]).params
    assert json.loads(params["router"]) == {
        "policy": "cache_aware",
        "cache_threshold": "0.5",
        "dp_aware": True,
    }
    assert json.loads(params["sglang"]) == {"page_size": "1"}


def test_flags_of_our_own_stay_what_they_are():
    url = "http://127.0.0.1:1"
    context = train_command.make_context("train", ["--sglang-url", url, "--sglang-python=py"])
    assert (context.params["sglang_url"], context.params["sglang_python"]) == (url, "py")
    assert context.params["sglang"] is None


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--sglang-dtype", "x"], "arguments of servers that the run starts"),
        (["--sglang-url", "http://127.0.0.1:1"], "needs engine = sglang"),
        (
            ["--engine", "sglang", "--sglang-url", "http://127.0.0.1:1,http://127.0.0.1:1"],
            "name each server once",
        ),
        (["--router-policy", "random"], "router has no effect without several servers"),
        *(
            pytest.param(["--engine", "sglang", *words], message, marks=pytest.mark.full)
            for words, message in (
                # The connection is tried again for some seconds.
                (["--sglang-url", "http://127.0.0.1:1"], "is the server up?"),
                (["--sglang", '{"dtype": {}}'], "`dtype` is a number, a text, true, false"),
                (["--sglang-python", "/nowhere/python"], "/nowhere/python cannot be run"),
                (
                    ["--sglang-dtype", "x"],
                    "install SGLang there (with a GPU: pip install 'agentrl[sglang]'), or",
                ),
            )
        ),
        (["--engine", "sglang", "--rollout-num-engines", "0"], "rollout_num_engines"),
        (["--sglang-groups", '[{"num_engines": 2}]'], "sglang_groups are of servers that the run starts"),
        (["--sglang-groups", '{"num_engines": 2}'], "--sglang-groups takes a JSON list"),
        (
            ["--engine", "sglang", "--sglang-groups", '[{"worker_type": "decode"}]'],
            "servers that are decode cannot serve together",
        ),
        (
            ["--engine", "sglang", "--rollout-num-engines", "2", "--sglang-groups", "[{}]"],
            "each of which has num_engines",
        ),
        (["--engine", "sglang", "--sglang-groups", '[{"worker_tpye": "decode"}]'], "worker_tpye"),
        (["--sglang-models", '{"judge": {}}'], "judge.hf_checkpoint"),
        (["--sglang-models", '{"a.b": {"hf_checkpoint": "x"}}'], "a.b"),
        (
            ["--sglang-models", '{"judge": {"hf_checkpoint": "nowhere"}}'],
            "holds no config.json",
        ),
        (["--env-kwargs", '{"x": "sglang_models.judge"}'], "is no model of this run, which serves none"),
    ],
)
def test_a_mistake_is_one_sentence(tmp_path, capfd, words, message):
    output = complaint(capfd, "train", "--env=Calculator-v0", "--inline", f"--output-dir={tmp_path}", *words)
    assert message in output


@pytest.mark.parametrize("name", ["partial_rollout", "normalize_advantages", "use_rollout_logprobs", "bf16"])
def test_a_setting_that_is_on_or_off_takes_no_value(name):
    flag = name.replace("_", "-")
    for words, value in (([f"--{flag}"], True), ([f"--no-{flag}"], False), ([], None)):
        assert train_command.make_context("train", words).params[name] is value
