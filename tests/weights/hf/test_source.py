"""A model folder that brings code of its own: refused, and nobody is asked."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest

import agentrl
from agentrl.errors import ModelLoadError
from agentrl.weights.hf.loading import open_directory
from agentrl.weights.hf.source import open_config, open_tokenizer

LOADERS = {"from_pretrained", "from_config"}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder whose config, model and tokenizer are classes in a Python file of the folder."""
    classes = {
        "AutoConfig": "mine.Config",
        "AutoModelForCausalLM": "mine.Model",
        "AutoTokenizer": ["mine.T", None],
    }
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mine", "auto_map": classes}))
    tokenizer = {"tokenizer_class": "T", "auto_map": {"AutoTokenizer": ["mine.T", None]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    (tmp_path / "mine.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\n")

    def asked(*_):
        raise AssertionError("a question on the terminal")

    monkeypatch.setattr("builtins.input", asked)
    yield tmp_path
    assert not (tmp_path / "ran").exists()


def test_code_of_a_model_folder_is_never_run_and_nobody_is_asked(folder):
    import torch

    for load in (open_config, open_tokenizer, lambda path: open_directory(path, torch.float32)):
        with pytest.raises(ModelLoadError) as caught:
            load(folder)
        assert "question" not in str(caught.value)


@pytest.mark.parametrize(
    "config", ["[" * 100_000, "[]", "3", '{"tokenizer_class": 5}', f'{{"x": {"9" * 9999}}}']
)
def test_a_tokenizer_of_whatever_a_file_may_hold_is_refused_in_one_sentence(tmp_path, config):
    model = {"version": "1.0", "added_tokens": [], "model": {"type": "X"}}
    (tmp_path / "tokenizer.json").write_text(json.dumps(model))
    with pytest.raises(ModelLoadError, match=r"^the tokenizer in .* cannot be loaded: .+$"):
        open_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(config)
    for text in ("{}", config, json.dumps(model)):
        (tmp_path / "tokenizer.json").write_text(text)
        with pytest.raises(ModelLoadError, match=r"^the tokenizer in .* cannot be loaded: .+$"):
            open_tokenizer(tmp_path)


def test_every_loader_of_transformers_refuses_code():
    root = Path(agentrl.__file__).parent.parent
    folders = ("agentrl", "benchmarks", "envs_contrib", "examples")
    for path in (path for folder in folders for path in (root / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            owner = node.func.value
            if node.func.attr in LOADERS and isinstance(owner, ast.Name) and owner.id.startswith("Auto"):
                keywords = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
                assert keywords.get("trust_remote_code") == "False", f"{path}:{node.lineno}"
