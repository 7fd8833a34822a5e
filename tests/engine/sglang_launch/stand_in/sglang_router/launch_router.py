"""A stand-in for sglang-router: it adds a server after a delay, if that server responds."""

from __future__ import annotations

import argparse
import json
import threading
import time
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

DELAY_S = 0.15
workers: dict[str, dict[str, object]] = {}


def add_worker(payload: dict[str, object]) -> None:
    time.sleep(DELAY_S)
    url = str(payload["url"])
    with urllib.request.urlopen(f"{url}/about", timeout=1):
        workers[url] = {"id": f"id-{url[-5:]}", **payload, "is_healthy": False}
    time.sleep(DELAY_S)
    workers[url]["is_healthy"] = True


def remove_worker(key: str) -> None:
    time.sleep(DELAY_S)
    for url in [url for url, worker in workers.items() if worker["id"] == key]:
        del workers[url]


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._reply(200, {"workers": list(workers.values()), "total": len(workers), "flags": flags})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        threading.Thread(target=add_worker, args=[body], daemon=True).start()
        self._reply(202, {"status": "accepted"})

    def do_DELETE(self) -> None:
        threading.Thread(target=remove_worker, args=[self.path.rpartition("/")[2]], daemon=True).start()
        self._reply(202, {"status": "accepted"})

    def _reply(self, status: int, payload: dict[str, object]) -> None:
        body = json.dumps(payload).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


parser = argparse.ArgumentParser()
parser.add_argument("--host", required=True)
parser.add_argument("--port", type=int, required=True)
arguments, flags = parser.parse_known_args()
ThreadingHTTPServer((arguments.host, arguments.port), Handler).serve_forever()
