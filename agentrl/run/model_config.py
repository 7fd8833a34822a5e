"""The shape of a run's model, for `log_model_config`."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from transformers import PreTrainedConfig

from agentrl.assembly.config import RunConfig
from agentrl.engine.config import EngineConfig, dtype_of
from agentrl.types import JSON
from agentrl.weights.hf.source import ModelSource
from agentrl.weights.hf.tensors import tensor_shapes

FILE = "model_config.json"
_SIZES = {
    "layers": "num_hidden_layers",
    "hidden size": "hidden_size",
    "feed-forward size": "intermediate_size",
    "attention heads": "num_attention_heads",
    "key-value heads": "num_key_value_heads",
    "head size": "head_dim",
    "vocabulary": "vocab_size",
    "context": "max_position_embeddings",
}
# The first that matches a parameter's name: a norm inside attention is a norm.
_COMPONENTS = {
    "norms": r"norm",
    "embedding": r"embed",
    "output head": r"lm_head",
    "attention": r"attn|attention",
    "experts": r"expert",
    "feed-forward": r"mlp|feed_forward",
}
_OTHER = "other"


def write_model_config(source: ModelSource, config: RunConfig, folder: Path) -> Iterator[str]:
    """Write model_config.json into the run's folder, and yield lines for the terminal."""
    facts: dict[str, JSON] = {
        "directory": str(source.directory),
        "trainer": config.trainer.trainer,
        "engine": config.engine.engine,
        **shape_facts(source.config, config),
        "config": json.loads(source.config.to_json_string(use_diff=False)),
    }
    (folder / FILE).write_text(json.dumps(facts, indent=1), encoding="utf-8")
    sizes, parameters = _sizes(source.config), _parameters(source.config)
    yield f"Model: {source.config.model_type} in {source.directory}"
    yield "  " + ", ".join(f"{name} {size}" for name, size in sizes.items())
    shares = ", ".join(f"{name} {count:,}" for name, count in parameters.items())
    yield f"  {sum(parameters.values()):,} parameters: {shares}"
    yield "  dtype: " + ", ".join(f"{name} {dtype}" for name, dtype in _dtypes(source.config, config).items())


def shape_facts(model: PreTrainedConfig, config: RunConfig) -> dict[str, JSON]:
    """Type, sizes, parameters by component (count) and dtypes of a model, from its config alone."""
    parameters = _parameters(model)
    return {
        "model_type": model.model_type,
        "sizes": _sizes(model),
        "parameters": {"total": sum(parameters.values()), **parameters},
        "dtypes": _dtypes(model, config),
    }


def _dtypes(model: PreTrainedConfig, config: RunConfig) -> dict[str, JSON]:
    return {
        "model directory": str(model.dtype or "float32").removeprefix("torch."),
        "trained in": "bfloat16" if config.trainer.bf16 else "float32",
        **_served_in(config.engine),
    }


def _served_in(engine: EngineConfig) -> dict[str, JSON]:
    """The dtypes that the engine computes in; of servers that run already nothing is known."""
    if engine.engine == "embedded":
        return {"sampled in": engine.engine_dtype}
    if engine.sglang_url is not None:
        return {}
    groups = engine.groups
    dtypes = [dtype_of(engine.arguments_of(group), on_gpu=engine.gpus_of(group) > 0) for group in groups]
    return {"sampled in": ", ".join(dict.fromkeys(dtypes))}


def _sizes(model: PreTrainedConfig) -> dict[str, JSON]:
    values = model.get_text_config().to_dict()
    return {name: values[key] for name, key in _SIZES.items() if values.get(key) is not None}


def _parameters(model: PreTrainedConfig) -> dict[str, int]:
    """The parameters of each component (count); tied ones count once."""
    counts: Counter[str] = Counter()
    for name, shape in tensor_shapes(model).items():
        counts[_component(name)] += math.prod(shape)
    return dict(counts.most_common())


def _component(name: str) -> str:
    return next((part for part, pattern in _COMPONENTS.items() if re.search(pattern, name)), _OTHER)
