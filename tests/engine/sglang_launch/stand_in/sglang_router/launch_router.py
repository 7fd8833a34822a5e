"""Answers as sglang-router does about its servers: it takes one in a little later, if that one answers."""

from __future__ import annotations

import argparse
import json
import threading
import time
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

LATER_S = 0.15
workers: dict[str, dict[str, object]] = {}


def take_in(told: dict[str, object]) -> None:
    time.sleep(LATER_S)
    url = str(told["url"])
    with urllib.request.urlopen(f"{url}/about", timeout=1):
        workers[url] = {"id": f"id-{url[-5:]}", **told, "is_healthy": False}
    time.sleep(LATER_S)
    workers[url]["is_healthy"] = True


def let_go(key: str) -> None:
    time.sleep(LATER_S)
    for url in [url for url, worker in workers.items() if worker["id"] == key]:
        del workers[url]


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._say(200, {"workers": list(workers.values()), "total": len(workers), "flags": flags})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        threading.Thread(target=take_in, args=[body], daemon=True).start()
        self._say(202, {"status": "accepted"})

    def do_DELETE(self) -> None:
        threading.Thread(target=let_go, args=[self.path.rpartition("/")[2]], daemon=True).start()
        self._say(202, {"status": "accepted"})

    def _say(self, status: int, told: dict[str, object]) -> None:
        body = json.dumps(told).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


parser = argparse.ArgumentParser()
parser.add_argument("--host", required=True)
parser.add_argument("--port", type=int, required=True)
given, flags = parser.parse_known_args()
ThreadingHTTPServer((given.host, given.port), Handler).serve_forever()
