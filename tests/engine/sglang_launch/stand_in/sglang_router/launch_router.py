"""A stand-in for sglang-router: it adds a server after a delay, if that server responds.

It forwards the requests of one routing key to one server, and those of a new one to the server with the
fewest running requests; where a server drops a request, it answers 500.
"""

from __future__ import annotations

import argparse
import json
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

DELAY_S = 0.15
workers: dict[str, dict[str, object]] = {}
servers: dict[str, str] = {}
running: Counter[str] = Counter()
choosing = threading.Lock()


def add_worker(payload: dict[str, object]) -> None:
    time.sleep(DELAY_S)
    url = str(payload["url"])
    with urllib.request.urlopen(f"{url}/health", timeout=1):
        workers[url] = {"id": f"id-{url[-5:]}", **payload, "is_healthy": False}
    time.sleep(DELAY_S)
    workers[url]["is_healthy"] = True


def remove_worker(key: str) -> None:
    time.sleep(DELAY_S)
    for url in [url for url, worker in workers.items() if worker["id"] == key]:
        del workers[url]


def server_of(key: str) -> str:
    """The server of a routing key, which gets a request."""
    with choosing:
        if servers.get(key) not in workers:
            servers[key] = min(workers, key=lambda url: running[url])
        running[servers[key]] += 1
        return servers[key]


def forwarded(path: str, body: bytes, key: str) -> tuple[int, bytes]:
    """The reply to a request of a routing key."""
    url = server_of(key)
    headers = {"content-type": "application/json", "x-smg-routing-key": key}
    try:
        with urllib.request.urlopen(urllib.request.Request(url + path, body, headers)) as reply:
            return reply.status, reply.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()
    except OSError as error:
        return 500, str(error).encode()
    finally:
        running[url] -= 1


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        if self.path == "/server_info":
            return self._reply(404, {})
        return self._reply(200, {"workers": list(workers.values()), "total": len(workers), "flags": flags})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        if self.path != "/workers":
            return self._send(*forwarded(self.path, body, self.headers["x-smg-routing-key"]))
        threading.Thread(target=add_worker, args=[json.loads(body)], daemon=True).start()
        return self._reply(202, {"status": "accepted"})

    def do_DELETE(self) -> None:
        threading.Thread(target=remove_worker, args=[self.path.rpartition("/")[2]], daemon=True).start()
        self._reply(202, {"status": "accepted"})

    def _reply(self, status: int, payload: dict[str, object]) -> None:
        self._send(status, json.dumps(payload).encode())

    def _send(self, status: int, body: bytes) -> None:
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
