"""The engine room: what samples tokens. Importing it is light; each engine is its own module.

`fake` is torch-free and deterministic, `embedded` decodes Hugging Face weights in this process,
`conformance` holds what every engine must keep.
"""

from agentrl.engine.config import EngineConfig

__all__ = ["EngineConfig"]
