"""Starts SGLang with a key from the environment, where `ps` and its own log do not show it.

    AGENTRL_SERVER_KEY=... python -m agentrl_sglang_key [SGLang's arguments]

The interpreter of the servers runs it. SGLang asks for the key at every address except those of its health.
As observed on SGLang 0.5.15. This module imports nothing of agentrl.
"""

import os
import sys

VARIABLE = "AGENTRL_SERVER_KEY"
_MODULE = "agentrl_sglang_key"


class HiddenKey(str):
    """A key that a log shows as stars: SGLang logs the representation of all its arguments."""

    # SGLang's other processes unpickle it: they import this file as a module, not as __main__.
    __module__ = _MODULE
    __slots__ = ()

    def __repr__(self) -> str:
        """Stars."""
        return "'***'"


def main() -> None:
    """Run a server until it ends."""
    from sglang.launch_server import run_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    sys.modules[_MODULE] = sys.modules[__name__]
    # Its children need no key in their environment.
    key = os.environ.pop(VARIABLE)
    load_plugins()
    server_args = prepare_server_args(sys.argv[1:])
    server_args.api_key = HiddenKey(key)
    try:
        run_server(server_args)
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


if __name__ == "__main__":
    main()
