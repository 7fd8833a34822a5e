"""SGLang's own layers take new weights in block fp8, and the loader reads them back.

Its kernels for fp8 need a GPU, or AMX; layers are built and filled without them.
"""

from __future__ import annotations

import json
import subprocess

import pytest
import torch

from agentrl.engine.sglang.inside import agentrl_sglang
from agentrl.engine.sglang.transports.bucket_files import write_bucket
from agentrl.engine.sglang.transports.inside import LOADER_FOLDER
from agentrl.weights.codec import pack_buckets, unpack
from agentrl.weights.hf.casting import cast_directory
from agentrl.weights.hf.loading import open_directory
from tests.engine.serving import free_port, sglang_python
from tests.trainer.test_cast_weights import HostSink, move
from tests.trainer.tiny import POLICY_LOSS, tokenizer, trainer
from tests.weights.hf.quantizing import model_of

pytestmark = pytest.mark.full

LAYERS = """
import json, sys
from pathlib import Path
folder, request, port = sys.argv[1:]
import torch
from safetensors.torch import load_file
from transformers import AutoConfig
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.distributed import init_distributed_environment, initialize_model_parallel
from sglang.srt.layers.dp_attention import initialize_dp_attention
from sglang.srt.layers.quantization.fp8 import Fp8Config
from sglang.srt.models.qwen3 import Qwen3ForCausalLM
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler
import agentrl_sglang

arguments = ServerArgs(model_path=folder, device="cpu", attention_backend="torch_native")
set_global_server_args_for_scheduler(arguments)
address = f"tcp://127.0.0.1:{port}"
init_distributed_environment(1, 0, local_rank=0, backend="gloo", distributed_init_method=address)
initialize_model_parallel(1)
initialize_dp_attention(arguments, ModelConfig.from_server_args(arguments))
config = json.loads(Path(folder, "config.json").read_text())
quantization = Fp8Config.from_config(config["quantization_config"])
torch.set_default_dtype(torch.bfloat16)
model = Qwen3ForCausalLM(AutoConfig.from_pretrained(folder), quant_config=quantization)
model.load_weights(load_file(Path(folder, "model.safetensors")).items())
content = bytearray(Path(request).read_bytes())
agentrl_sglang.load(model, [("", torch.frombuffer(content, dtype=torch.uint8))])
scales = {name: list(p.shape) for name, p in model.named_parameters() if name.endswith("_scale_inv")}
print(json.dumps(scales))
"""


async def test_layers_of_sglang_hold_what_was_published(tmp_path, monkeypatch):
    whole = {"hidden_size": 128, "intermediate_size": 256, "num_key_value_heads": 4}
    model_of("qwen3", **whole).bfloat16().save_pretrained(tmp_path / "plain")
    tokenizer().save_pretrained(tmp_path / "plain")
    cast_directory(tmp_path / "plain", tmp_path / "fp8", "fp8")
    sink, ours = HostSink(), trainer(model := open_directory(tmp_path / "fp8", torch.float32), POLICY_LOSS)
    move(model)
    await ours.publish(sink, version=1)
    tensors = [pair for bucket in await sink.snapshot.buckets() for pair in unpack(bucket)]
    # Others are rounded to what the server keeps, and are compared as such.
    tensors = [(n, t.bfloat16() if t.itemsize == 4 and "_scale" not in n else t) for n, t in tensors]
    (bucket,) = pack_buckets(tensors, 1 << 30)
    path, reply = (tmp_path / f"{agentrl_sglang.PREFIX}{name}" for name in ("file", "reply"))
    reply.touch()
    files = [[str(path), write_bucket(path, 0, [bucket])]]
    request = {"action": "load_all", "reply": str(reply), "files": files}
    (tmp_path / "request").write_text(json.dumps(request))
    monkeypatch.setenv("SGLANG_USE_CPU_ENGINE", "1")
    monkeypatch.setenv("PYTHONPATH", str(LOADER_FOLDER))
    command = [sglang_python(), "-c", LAYERS, tmp_path / "fp8", tmp_path / "request", str(free_port())]
    done = subprocess.run([*map(str, command)], check=True, stdout=subprocess.PIPE, text=True)
    # Each tensor in the model has been compared with the sent one, bit for bit; none was left out.
    assert json.loads(reply.read_text()) == {"error": None, "tensors": {}}
    scales = json.loads(done.stdout.splitlines()[-1])
    assert scales["model.layers.0.self_attn.qkv_proj.weight_scale_inv"] == [3, 1]
    assert scales["model.layers.0.mlp.gate_up_proj.weight_scale_inv"] == [4, 1]
