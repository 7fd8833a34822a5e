"""A plugin of SGLang: it reads the config of a MiMo without the Python files of the model's folder.

0.5.15 has the model, and of its config only what these files say: they would be run.

SGLang calls `register`, an entry point, in each process of a server. This module imports nothing of agentrl.
"""

from __future__ import annotations


def register() -> None:
    """Have transformers know the type."""
    from transformers import AutoConfig, Qwen2Config

    class _MiMo(Qwen2Config):
        model_type = "mimo"

    AutoConfig.register(_MiMo.model_type, _MiMo, exist_ok=True)
