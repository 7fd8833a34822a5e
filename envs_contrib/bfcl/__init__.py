"""The conversations of several turns of the Berkeley Function Calling Leaderboard, version 4.

    pip install --no-deps bfcl-eval==2026.3.23
    pip install mpmath
    agentrl eval BFCLBase-v0 --openai-url http://127.0.0.1:30000/v1 --openai-model MODEL --n 200

`docs/bfcl-and-tau2.md` is the guide.
"""

from agentrl import register
from envs_contrib.bfcl.env import BFCL

__all__ = ["BFCL", "base", "long_context", "miss_func", "miss_param"]

base = register("BFCLBase-v0", BFCL, category="base")
long_context = register("BFCLLongContext-v0", BFCL, category="long_context")
miss_func = register("BFCLMissFunc-v0", BFCL, category="miss_func")
miss_param = register("BFCLMissParam-v0", BFCL, category="miss_param")
