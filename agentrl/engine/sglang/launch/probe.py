"""Prints the arguments of this interpreter's SGLang, or of its router, as one line of JSON:

    python probe.py sglang|sglang_router [FOLDER]

The interpreter of the servers runs it, which may be older than this process's, in another environment. The
script imports nothing of agentrl. Importing SGLang takes seconds, so the answer is kept in FOLDER, under a
name that depends on everything that it depends on.
"""

import argparse
import hashlib
import json
import os
import sys
from importlib.util import find_spec

# The directory of this file is on sys.path; its modules must not shadow others of the same name.
sys.path[:] = [folder for folder in sys.path if folder != os.path.dirname(os.path.abspath(__file__))]
_VARIABLES = ("PYTHONPATH", "CUDA_VISIBLE_DEVICES", "SGLANG_USE_CPU_ENGINE")


def _describe(action: argparse.Action) -> "dict[str, object]":
    takes = "nothing" if action.nargs == 0 else "one" if action.nargs in (None, "?") else "several"
    choices = None if action.choices is None else [str(choice) for choice in action.choices]
    return {"options": list(action.option_strings), "takes": takes, "choices": choices}


def _described(package: str) -> str:
    parser = argparse.ArgumentParser(add_help=False)
    if package == "sglang":
        from sglang.srt.server_args import ServerArgs
        from sglang.version import __version__

        ServerArgs.add_cli_args(parser)
    else:
        from sglang_router.router_args import RouterArgs
        from sglang_router.version import __version__

        RouterArgs.add_cli_args(parser)
    described = {"version": __version__, "arguments": [_describe(action) for action in parser._actions]}
    return json.dumps(described)


def _key(package: str) -> str:
    """A hash of the interpreter, its settings, and every file of the package; "" = it is not installed."""
    spec = find_spec(package)
    if spec is None or spec.origin is None:
        return ""
    parts = [sys.executable, sys.version, *(os.environ.get(name, "") for name in _VARIABLES)]
    for folder, names, files in os.walk(os.path.dirname(spec.origin)):
        names[:] = sorted(name for name in names if name != "__pycache__")
        for file in sorted(files):
            try:
                facts = os.stat(os.path.join(folder, file))
            except OSError:
                continue
            parts.append(f"{os.path.join(folder, file)} {facts.st_size} {facts.st_mtime_ns}")
    return hashlib.sha256("\n".join(parts).encode("utf-8", "surrogateescape")).hexdigest()


def _kept(path: str) -> str:
    try:
        with open(path, encoding="utf-8") as file:
            return file.read()
    except OSError:
        return ""


def _keep(path: str, text: str) -> None:
    part = f"{path}.{os.getpid()}"
    try:
        with open(part, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(part, path)
    except OSError:
        pass


def main() -> None:
    """Print the arguments of the installed package."""
    package, *folders = sys.argv[1:]
    key = _key(package) if folders else ""
    path = os.path.join(folders[0], f"{key}.json") if key else ""
    text = _kept(path) if path else ""
    if not text:
        text = _described(package)
        if path:
            _keep(path, text)
    # A separate line: imported modules may print, too.
    print("\n" + text, flush=True)


if __name__ == "__main__":
    main()
