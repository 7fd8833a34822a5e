"""AgentDojo's four worlds (arXiv:2406.13352), their user tasks and their prompt injections.

    pip install 'agentrl[agentdojo]'
    agentrl eval AgentDojoBanking-v0 --openai-url http://127.0.0.1:30000/v1 --openai-model MODEL --n 144 \\
        --env-kwargs '{"attack": "important_instructions"}'

`docs/agentdojo.md` is the guide.
"""

from agentrl import register
from envs_contrib.agentdojo.env import AgentDojo, attack_success

__all__ = ["AgentDojo", "attack_success", "banking", "slack", "travel", "workspace"]

banking = register("AgentDojoBanking-v0", AgentDojo, suite="banking")
slack = register("AgentDojoSlack-v0", AgentDojo, suite="slack")
travel = register("AgentDojoTravel-v0", AgentDojo, suite="travel")
workspace = register("AgentDojoWorkspace-v0", AgentDojo, suite="workspace")
