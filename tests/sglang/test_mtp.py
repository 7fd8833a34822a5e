"""SGLang's own model of MiMo, and the one that it drafts with, each load their part of one request."""

from __future__ import annotations

import json
import subprocess

import pytest

from agentrl.engine.sglang.inside import agentrl_sglang
from agentrl.engine.sglang.transports.bucket_files import write_bucket
from agentrl.engine.sglang.transports.inside import LOADER_FOLDER, ahead_of
from agentrl.weights.codec import manifest_of, pack_buckets
from agentrl.weights.hf.tensors import TensorFiles
from tests.engine.serving import free_port, sglang_python
from tests.trainer.megatron.ahead import save_with

pytestmark = pytest.mark.full

MODELS = """
import sys
from pathlib import Path
folder, request, port = sys.argv[1:]
import torch
from transformers import Qwen2Config
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.distributed import init_distributed_environment, initialize_model_parallel
from sglang.srt.layers.dp_attention import initialize_dp_attention
from sglang.srt.models.mimo import MiMoForCausalLM
from sglang.srt.models.mimo_mtp import MiMoMTP
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler
import agentrl_sglang, agentrl_sglang_types

agentrl_sglang_types.register()
arguments = ServerArgs(model_path=folder, device="cpu", attention_backend="torch_native")
set_global_server_args_for_scheduler(arguments)
address = f"tcp://127.0.0.1:{port}"
init_distributed_environment(1, 0, local_rank=0, backend="gloo", distributed_init_method=address)
initialize_model_parallel(1)
read = ModelConfig.from_server_args(arguments)
initialize_dp_attention(arguments, read)
content = torch.frombuffer(bytearray(Path(request).read_bytes()), dtype=torch.uint8)
for model in (MiMoMTP(read.hf_config), MiMoForCausalLM(read.hf_config)):
    agentrl_sglang.load(model, [("", content)])
print(read.hf_config.model_type, read.hf_config.num_nextn_predict_layers)
"""


def test_both_hold_what_was_sent(tmp_path, monkeypatch):
    folder = save_with(tmp_path / "model", "mimo")
    with TensorFiles(folder) as files:
        tensors = [(name, files.read(name)) for name in sorted(files.names)]
    (bucket,) = pack_buckets(tensors, 1 << 30)
    path, reply = (tmp_path / f"{agentrl_sglang.PREFIX}{name}" for name in ("file", "reply"))
    reply.touch()
    files = [[str(path), write_bucket(path, 0, [bucket])]]
    ahead = ahead_of(manifest_of(tensors))
    request = {"action": "load_all", "reply": str(reply), "files": files, "ahead": ahead}
    (tmp_path / "request").write_text(json.dumps(request))
    monkeypatch.setenv("SGLANG_USE_CPU_ENGINE", "1")
    monkeypatch.setenv("PYTHONPATH", str(LOADER_FOLDER))
    command = [sglang_python(), "-c", MODELS, folder, tmp_path / "request", str(free_port())]
    done = subprocess.run([*map(str, command)], check=True, stdout=subprocess.PIPE, text=True)
    # Each tensor in either model has been compared with the sent one, bit for bit; none was left out.
    assert json.loads(reply.read_text()) == {"error": None, "tensors": {}}
    assert done.stdout.splitlines()[-1] == "mimo 1"
