"""Listens as SGLang does: three processes and more, healthy after a while.

--habit ends: prints three lines and ends with code 3. hangs: is never healthy. stubborn: ignores SIGTERM, and
so do its children. meets FOLDER N: is healthy when N servers have started with the same folder. collides
FOLDER N: the first N that start with the folder find a port taken, as SGLang says it, and are killed. slow:
says what it does, as SGLang does, half a second each.
GET /about returns its arguments, some of its environment, and the pids of all its processes.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

from sglang.srt.server_args import ServerArgs

SLEEP = [sys.executable, "-I", "-S", "-c", "import time; time.sleep(100)"]
APART = "import time; print(flush=True); time.sleep(100)"
DEAF = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {APART}"
TIDY = "import os, sys; open(os.environ['TIDIED'], 'w').write(sys.stdin.read() + 'yes')"
TAKEN = """torch.distributed.DistNetworkError: The socket has failed to listen on any local network address.
port: 43645, useIpv6: false, code: -98, name: EADDRINUSE, message: address already in use
Received sigquit from a child process. It usually means the child failed."""
LINES = (
    "[2026-01-01 10:00:00] Init torch distributed begin.",
    "[2026-01-01 10:00:01] Load weight begin. avail mem=21.34 GB",
    "Multi-thread loading shards:   0% Completed | 0/1\rMulti-thread loading shards: 100% Completed | 1/1",
    "[2026-01-01 10:00:02] Load weight end. elapsed=0.02 s, type=Qwen3ForCausalLM",
    "[2026-01-01 10:00:03] Capture target decode CUDA graph begin. backend=full, bs=[1, 2]",
    "[2026-01-01 10:00:04] Tree cache initialized: source=default impl=RadixCache",
)
REPORTED_VARIABLES = (
    "TRITON_CACHE_DIR",
    "CUDA_VISIBLE_DEVICES",
    "SGLANG_USE_CPU_ENGINE",
    "OMP_NUM_THREADS",
    "PYTHONPATH",
    "OF_THE_TEST",
    "PYTHONSAFEPATH",
    "RAY_AUTH_TOKEN",
    "PROMETHEUS_MULTIPROC_DIR",
)


def collide(folder: Path, number: int) -> None:
    if len(list(folder.iterdir())) < number:
        Path(folder, str(os.getpid())).touch()
        print(TAKEN, file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)


def be_slow() -> None:
    for line in LINES:
        time.sleep(0.5)
        print(line, file=sys.stderr, flush=True)
    time.sleep(0.5)


def main() -> None:
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    arguments = parser.parse_args()
    habit, *details = arguments.habit or [""]
    print(f"habit: {habit}", flush=True)
    if habit == "ends":
        print("one line\nanother\n\x1b[31mno room for the weights", file=sys.stderr, flush=True)
        sys.exit(3)
    if habit == "collides":
        collide(Path(details[0]), int(details[1]))
    if habit == "slow":
        be_slow()
    if habit == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if "TIDIED" in os.environ:
        # It inherits that SIGTERM is ignored, and its stdin ends with this process.
        subprocess.Popen([*SLEEP[:-1], TIDY], stdin=subprocess.PIPE)
    plain = subprocess.Popen(SLEEP)
    code = DEAF if habit == "stubborn" else APART
    apart = subprocess.Popen([*SLEEP[:-1], code], start_new_session=True, stdout=subprocess.PIPE)
    assert apart.stdout is not None
    apart.stdout.readline()
    about = {
        "arguments": vars(arguments),
        "environment": {name: os.environ[name] for name in REPORTED_VARIABLES if name in os.environ},
        "pids": [os.getpid(), plain.pid, apart.pid],
    }
    if habit == "meets":
        Path(details[0], str(arguments.port)).touch()

    class Handler(BaseHTTPRequestHandler):
        num_requests = 0

        def do_GET(self) -> None:
            Handler.num_requests += 1
            all_started = habit != "meets" or len(list(Path(details[0]).iterdir())) == int(details[1])
            healthy = habit != "hangs" and all_started and Handler.num_requests > 1
            body = json.dumps(about).encode()
            self.send_response(503 if self.path == "/health" and not healthy else 200)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    print(json.dumps(about["pids"]), flush=True)
    HTTPServer((arguments.host, arguments.port), Handler).serve_forever()


if __name__ == "__main__":
    main()
