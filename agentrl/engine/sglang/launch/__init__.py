"""SGLang servers and their router, here or on the machines of a cluster. Free of torch; Linux only.

`Servers` starts and stops groups of servers and a router. `ServerProcess` and `RouterProcess` are one process
each; a `Launcher` decides on which machine. `arguments` are SGLang's own, checked against the installed
version.
"""

from agentrl.engine.sglang.launch.arguments import Arguments, Value, from_flags
from agentrl.engine.sglang.launch.launcher import Launcher, LocalLauncher
from agentrl.engine.sglang.launch.process import ServerProcess, ServerSettings
from agentrl.engine.sglang.launch.router import RouterProcess
from agentrl.engine.sglang.launch.servers import ServerReplicas, Servers

__all__ = [
    "Arguments",
    "Launcher",
    "LocalLauncher",
    "RouterProcess",
    "ServerProcess",
    "ServerReplicas",
    "ServerSettings",
    "Servers",
    "Value",
    "from_flags",
]
