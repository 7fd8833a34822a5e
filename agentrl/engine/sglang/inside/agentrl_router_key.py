"""Starts sglang-router with a key from the environment, where `ps` does not show it.

    AGENTRL_SERVER_KEY=... python -m agentrl_router_key [sglang-router's arguments]

The interpreter of the servers runs it. The router asks for the key at every address but those of its health,
of the model's name and of the servers' metrics, which it tells anybody. As observed on sglang-router 0.3.2.
This module imports nothing of agentrl.
"""

import os
import sys

VARIABLE = "AGENTRL_SERVER_KEY"


def main() -> None:
    """Run a router until it ends."""
    from sglang_router.launch_router import launch_router, parse_router_args

    key = os.environ.pop(VARIABLE)
    arguments = parse_router_args(sys.argv[1:])
    arguments.api_key = key
    launch_router(arguments)


if __name__ == "__main__":
    main()
