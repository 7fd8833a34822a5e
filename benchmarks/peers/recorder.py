"""`agentrl gateway` before a chat endpoint, as a program of the benchmark.

    python -m benchmarks.peers.recorder '{"upstream": "http://127.0.0.1:PORT/v1", "folder": "FOLDER"}'

It prints {"url": ...}, and ends with its standard input.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from pathlib import Path

from agentrl.config import by_section, parse
from agentrl.evaluation.config import GatewayConfig
from agentrl.evaluation.gateway import serve_gateway


def main(upstream: str, folder: str) -> None:
    """Serve until the standard input ends."""
    flags = {"openai_url": upstream, "openai_model": "m", "output_dir": folder, "port": "0"}
    config = parse(GatewayConfig, by_section(GatewayConfig, flags), source="the benchmark")

    def ready(url: str, folder: Path) -> None:
        print(json.dumps({"url": url, "folder": str(folder)}), flush=True)

    def end() -> None:
        sys.stdin.read()
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=end, daemon=True).start()
    serve_gateway(None, config, ready=ready)


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
