"""Prints the arguments that the SGLang of this interpreter takes, as one line of JSON.

Run by the interpreter that will run the servers, which may be older than ours and of another environment.
It imports nothing of agentrl.
"""

import argparse
import json
import os
import sys

# The folder of this file holds modules of ours, which must not stand before others of their name.
sys.path[:] = [folder for folder in sys.path if folder != os.path.dirname(os.path.abspath(__file__))]


def _told(action: argparse.Action) -> "dict[str, object]":
    takes = "nothing" if action.nargs == 0 else "one" if action.nargs in (None, "?") else "several"
    choices = None if action.choices is None else [str(choice) for choice in action.choices]
    return {"options": list(action.option_strings), "takes": takes, "choices": choices}


def main() -> None:
    """Ask the installed SGLang."""
    from sglang.srt.server_args import ServerArgs
    from sglang.version import __version__

    parser = argparse.ArgumentParser(add_help=False)
    ServerArgs.add_cli_args(parser)
    told = {"version": __version__, "arguments": [_told(action) for action in parser._actions]}
    # A line of its own: what is imported may print, too.
    print("\n" + json.dumps(told), flush=True)


if __name__ == "__main__":
    main()
