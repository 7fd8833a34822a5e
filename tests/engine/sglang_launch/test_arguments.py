"""SGLang's own arguments: those of the installed version, unknown ones, and those that agentrl sets."""

from __future__ import annotations

import shutil
import stat
import sys
from pathlib import Path

import pytest

from agentrl.engine.sglang.launch import ServerProcess, ServerSettings, arguments, from_flags
from agentrl.engine.sglang.launch.arguments import Arguments, installed
from agentrl.errors import ConfigError
from tests.engine.serving import sglang_python
from tests.engine.sglang_launch.starting import STAND_IN, settings


@pytest.fixture
async def available(tmp_path: Path) -> Arguments:
    return await installed(Path(sys.executable), settings(tmp_path).environment_of(()))


def test_the_interpreter_reports_the_arguments_of_its_version(available: Arguments) -> None:
    assert available.version == "0.0.1"
    takes = {argument.options[0]: argument.takes for argument in available.arguments}
    assert takes["--tp-size"] == "one"
    assert takes["--disable-cuda-graph"] == "nothing"
    assert takes["--cuda-graph-bs"] == "several"


def test_values_become_a_command_line(available: Arguments) -> None:
    values = {
        "mem_fraction_static": 0.3,
        "disable-cuda-graph": True,
        "lora_strict_loading": False,
        "cuda_graph_bs": [1, 2],
        "attention_backend": "triton",
        "habit": ["-1"],
    }
    assert available.command_line(values, {}) == [
        "--mem-fraction-static=0.3",
        "--disable-cuda-graph",
        "--no-lora-strict-loading",
        *("--cuda-graph-bs", "1", "2"),
        "--attention-backend=triton",
        "--habit=-1",
    ]


def test_values_override_defaults_and_unsupported_defaults_are_left_out(available: Arguments) -> None:
    defaults = {"disable_cuda_graph": True, "tp_size": 1, "no_such_argument": 3}
    assert available.command_line({}, defaults) == ["--disable-cuda-graph", "--tp-size=1"]
    assert available.command_line({"tensor_parallel_size": 2, "disable_cuda_graph": False}, defaults) == [
        "--tensor-parallel-size=2"
    ]


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        (
            {"mem_fraction": 0.3},
            r"SGLang 0.0.1 has no argument `mem_fraction`. Did you mean `mem_fraction_static`\?",
        ),
        ({"port": 3}, "`port` is set by agentrl: a free one is chosen"),
        ({"model": "x"}, "`model` is set by agentrl: set hf_checkpoint, the folder"),
        ({"admin_api_key": "hunter2"}, "is set by agentrl: servers on other machines get a key of the run's"),
        ({"weight-version": "3"}, "it counts the trainer's updates"),
        ({"tp_size": 1, "tensor_parallel_size": 2}, "`tp_size` and `tensor_parallel_size` are one argument"),
        ({"tp_size": True}, "`tp-size` needs a value, not true"),
        ({"tp_size": [1, 2]}, "`tp_size` takes one value, not 2"),
        ({"cuda_graph_bs": []}, "takes one value, not 0"),
        ({"disable_cuda_graph": "yes"}, "is a switch: write true or false, not 'yes'"),
        ({"attention_backend": "tritn"}, "cannot be 'tritn'. Did you mean `triton`?"),
    ],
)
def test_an_invalid_argument_is_one_sentence(available: Arguments, values: dict, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        available.command_line(values, {})


def test_flags_are_the_same_arguments() -> None:
    flags = "--sglang-mem-fraction-static 0.3 --sglang-disable-cuda-graph --sglang-tp-size=2 --sglang-bs 1 2"
    assert from_flags(flags.split()) == {
        "mem_fraction_static": "0.3",
        "disable_cuda_graph": True,
        "tp_size": "2",
        "bs": ["1", "2"],
    }
    with pytest.raises(ConfigError, match=r"'0\.3' belongs to no flag; write --sglang-NAME before it"):
        from_flags(["0.3"])


async def test_an_interpreter_is_probed_once(tmp_path: Path) -> None:
    calls = tmp_path / "calls"
    script = tmp_path / "python"
    script.write_text(f'#!/bin/sh\necho once >> {calls}\nexec {sys.executable} "$@"\n')
    script.chmod(0o755)
    for _ in range(2):
        await installed(script, {"PYTHONPATH": str(STAND_IN)})
    assert calls.read_text() == "once\n"


async def test_without_sglang_the_interpreter_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"No module named 'sglang'.*install SGLang there"):
        await ServerProcess(settings(tmp_path, python_path=())).start()
    with pytest.raises(ConfigError, match="cannot be run"):
        await ServerProcess(settings(tmp_path, python=tmp_path / "nothing")).start()


async def test_an_answer_is_kept_for_later_runs_until_sglang_changes(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    shutil.copytree(STAND_IN, tmp_path / "installed")
    code = tmp_path / "installed/sglang/srt/server_args.py"
    imports = tmp_path / "imports"
    imports.touch()
    code.write_text(f"{code.read_text()}\nopen({str(imports)!r}, 'a').write('x')\n")
    environment = settings(tmp_path, python_path=(tmp_path / "installed",)).environment_of(())

    async def asked() -> Arguments:
        arguments._cache.clear()
        return await installed(Path(sys.executable), environment)

    first = await asked()
    assert await asked() == first
    assert imports.read_text() == "x"
    code.write_text(code.read_text().replace('"--tp-size"', '"--tensor-size"'))
    changed = await asked()
    assert imports.read_text() == "xx"
    assert first.has("tp_size")
    assert not changed.has("tp_size")
    # What is kept there is as private as code that is run.
    folder = tmp_path / "cache/agentrl/sglang-arguments"
    assert len(list(folder.iterdir())) == 2
    assert {stat.S_IMODE(path.stat().st_mode) for path in (folder, folder.parent)} == {0o700}


@pytest.mark.full
async def test_the_real_version_reports_its_arguments(tmp_path: Path) -> None:
    real = ServerSettings(model=tmp_path, log_folder=tmp_path, device="cpu", python=sglang_python())
    available = await installed(real.python, real.environment_of(()))
    assert available.version.startswith("0.5.")
    assert len(available.arguments) > 300
    command = await ServerProcess(real).command()
    assert "--attention-backend=torch_native" in command
    assert "--disable-overlap-schedule" in command
    with pytest.raises(ConfigError, match="Did you mean `mem_fraction_static`"):
        available.command_line({"mem_fraction_statc": 0.3}, {})
    for ours in (
        "host",
        "port",
        "model_path",
        "device",
        "weight_version",
        "base_gpu_id",
        "grpc_mode",
        "api_key",
        "admin_api_key",
        "config",
    ):
        with pytest.raises(ConfigError, match="is set by agentrl"):
            available.command_line({ours: "x"}, {})
