"""The texts of tokens, by the tokenizer of a run's folder."""

from __future__ import annotations

import pytest

from agentrl.assembly.token_texts import token_texts
from agentrl.errors import ModelLoadError
from agentrl.rendering.fresh_tokenizer import train_tokenizer


def test_a_runs_tokenizer_is_found_in_its_folder_or_by_its_config(tmp_path):
    tokenizer = train_tokenizer(["a bee sees a sea"], special_tokens=["<x>"], vocab_size=300)
    tokenizer.save_pretrained(tmp_path / "elsewhere")
    home = tmp_path / "run"
    home.mkdir()
    assert token_texts(home) is None
    (home / "config.toml").write_text(f'[model]\nhf_checkpoint = "{tmp_path / "elsewhere"}"\n')
    by_config = token_texts(home)
    tokenizer.save_pretrained(home / "model")
    (home / "config.toml").unlink()
    by_folder = token_texts(home)
    named = token_texts(tmp_path, str(tmp_path / "elsewhere"))
    ids = tokenizer.encode(" a bee sees<x>", add_special_tokens=False)
    for texts in (by_config, by_folder, named):
        assert "".join(map(texts, ids)) == " a bee sees<x>"
        assert texts(-1) == "⟨-1⟩"
        assert texts(2**40) == f"⟨{2**40}⟩"


def test_a_directory_without_a_tokenizer_is_one_sentence(tmp_path):
    with pytest.raises(
        ModelLoadError, match=r"there is no folder .*/nowhere; name a Hugging Face model directory"
    ):
        token_texts(tmp_path, str(tmp_path / "nowhere"))
