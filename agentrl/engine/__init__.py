"""Inference engines, which sample tokens. Importing this is light; each engine is its own module.

`fake` is torch-free and deterministic, `embedded` decodes Hugging Face weights in this process,
`conformance` holds the checks that every engine must pass.
"""

from agentrl.engine.config import EngineConfig

__all__ = ["EngineConfig"]
