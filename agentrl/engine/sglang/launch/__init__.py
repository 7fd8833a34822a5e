"""SGLang servers and their router as subprocesses. Free of torch; Linux only.

`Servers` starts and stops groups of servers and a router. `ServerProcess` and `RouterProcess` are one process
each; `arguments` are SGLang's own, checked against the installed version.
"""

from agentrl.engine.sglang.launch.arguments import Arguments, Value, from_flags
from agentrl.engine.sglang.launch.process import ServerProcess, ServerSettings
from agentrl.engine.sglang.launch.router import RouterProcess
from agentrl.engine.sglang.launch.servers import ServerReplicas, Servers

__all__ = [
    "Arguments",
    "RouterProcess",
    "ServerProcess",
    "ServerReplicas",
    "ServerSettings",
    "Servers",
    "Value",
    "from_flags",
]
