"""Prints the arguments of this interpreter's SGLang, as one line of JSON.

The interpreter of the servers runs it, which may be older than this process's, in another environment. The
script imports nothing of agentrl.
"""

import argparse
import json
import os
import sys

# The directory of this file is on sys.path; its modules must not shadow others of the same name.
sys.path[:] = [folder for folder in sys.path if folder != os.path.dirname(os.path.abspath(__file__))]


def _describe(action: argparse.Action) -> "dict[str, object]":
    takes = "nothing" if action.nargs == 0 else "one" if action.nargs in (None, "?") else "several"
    choices = None if action.choices is None else [str(choice) for choice in action.choices]
    return {"options": list(action.option_strings), "takes": takes, "choices": choices}


def main() -> None:
    """Print the arguments of the installed SGLang."""
    from sglang.srt.server_args import ServerArgs
    from sglang.version import __version__

    parser = argparse.ArgumentParser(add_help=False)
    ServerArgs.add_cli_args(parser)
    described = {"version": __version__, "arguments": [_describe(action) for action in parser._actions]}
    # A separate line: imported modules may print, too.
    print("\n" + json.dumps(described), flush=True)


if __name__ == "__main__":
    main()
