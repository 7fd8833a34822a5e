"""Weights from card to card between two processes, without a server: `python -m tests.gpu.transport_smoke`.

One line of JSON for each check, with its seconds and GB/s; the exit code is 1 where one of them failed. This
process packs as a rank does; another one has the loader of a server, and a model in plain torch. On a machine
with one card both are on it; with more, the other one is also tried on the second.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")

import torch

ROOT = Path(__file__).parents[2]
INSIDE = ROOT / "agentrl" / "engine" / "sglang" / "inside"
WIDTH = 4096
ROLES = ("sender", "server", "doomed")


class Model(torch.nn.Module):
    """Parameters p0, p1, .. in bfloat16, which a checkpoint names alike."""

    def __init__(self, rows: Sequence[int], device: torch.device) -> None:
        super().__init__()
        for number, count in enumerate(rows):
            data = torch.zeros(count, WIDTH, dtype=torch.bfloat16, device=device)
            self.register_parameter(f"p{number}", torch.nn.Parameter(data, requires_grad=False))

    def load_weights(self, weights) -> None:
        for name, tensor in weights:
            self.get_parameter(name).data.copy_(tensor)


def rows_of(num_bytes: int) -> list[int]:
    """Sizes as a model has them: one large tensor, and many others."""
    total, count = num_bytes // (2 * WIDTH), 200
    return [total // 8, *[(total - total // 8) // count] * count]


def sums_of(model: torch.nn.Module) -> list[int]:
    return [int(tensor.view(torch.int16).long().sum()) for tensor in model.parameters()]


def serve(device: torch.device, num_bytes: int) -> None:
    """The other process: one request a line."""
    sys.path.insert(0, str(INSIDE))
    import agentrl_sglang

    model = Model(rows_of(num_bytes), device)
    print(json.dumps({"free": torch.cuda.mem_get_info(device)[0]}), flush=True)
    for line in sys.stdin:
        with tempfile.TemporaryDirectory() as folder:
            reply = Path(folder) / f"{agentrl_sglang.PREFIX}reply"
            reply.touch()
            body = json.dumps({**json.loads(line), "reply": str(reply)}).encode()
            request = torch.frombuffer(bytearray(body), dtype=torch.uint8)
            torch.cuda.synchronize(device)
            began = time.perf_counter()
            agentrl_sglang.load(model, [("agentrl", request)])
            torch.cuda.synchronize(device)
            seconds = time.perf_counter() - began
            error = json.loads(reply.read_text() or '{"error": "no reply"}')["error"]
            print(
                json.dumps(
                    {
                        "seconds": seconds,
                        "error": error,
                        "sums": sums_of(model),
                        "free": torch.cuda.mem_get_info(device)[0],
                    }
                ),
                flush=True,
            )


class Process:
    """Another process of this file, which answers in lines of JSON."""

    def __init__(self, role: str, device: torch.device, num_bytes: int) -> None:
        command = [sys.executable, "-m", "tests.gpu.transport_smoke", "--role", role, "--device", str(device)]
        self._process = subprocess.Popen(
            [*command, "--bytes", str(num_bytes)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.started = self._answer()

    def ask(self, request: object) -> dict:
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def _answer(self) -> dict:
        line = self._process.stdout.readline()
        return json.loads(line) if line else {"error": "the process has gone", "seconds": 0.0, "sums": []}


def request_of(weights, **changes: object) -> dict:
    from agentrl.engine.sglang.transports.cuda_ipc import request_of

    return {**request_of(weights, is_whole=True), **changes}


class Sender:
    """What a rank does. source: its parameters, in memory of torch."""

    def __init__(self, device: torch.device, num_bytes: int) -> None:
        from agentrl.types.seams import TensorSpec

        self.device = device
        self.source = Model(rows_of(num_bytes), device)
        generator = torch.Generator(device).manual_seed(1)
        for tensor in self.source.parameters():
            tensor.normal_(generator=generator)
        self.specs = tuple(
            TensorSpec(name, tuple(tensor.shape), "bfloat16")
            for name, tensor in self.source.named_parameters()
        )

    def pack(self):
        from agentrl.weights.device import allocated, layout_of, packed, views_in

        def fill(load, bytes_B) -> None:
            for name, tensor in views_in(load, bytes_B):
                tensor.copy_(self.source.get_parameter(name))

        with torch.no_grad():
            layout = layout_of(
                [self.specs[:1], *(self.specs[n : n + 8] for n in range(1, len(self.specs), 8))]
            )
            memory = allocated(self.device, layout.num_bytes)
            if memory is None:
                raise SystemExit("no memory of the card can be shared: see the warning above")
            return packed(layout, memory, fill)


def doomed(device: torch.device, num_bytes: int) -> None:
    """A rank that is killed: it shows its handle, and waits."""
    packed = Sender(device, num_bytes).pack()
    print(json.dumps(request_of(packed.weights)), flush=True)
    time.sleep(600)


class Report:
    """Prints one line for each check. good: none has failed. size: of what is sent (bytes)."""

    def __init__(self, size: int) -> None:
        self.good, self.size = True, size

    def say(self, name: str, ok: bool, seconds: float = 0.0, **more: object) -> None:
        self.good &= ok
        rate = {"seconds": round(seconds, 5), "GB/s": round(self.size / seconds / 1e9, 1)} if seconds else {}
        print(json.dumps({"check": name, "ok": ok, **rate, **more}), flush=True)

    def timed(self, name: str, do: Callable[[], object], device: torch.device) -> object:
        torch.cuda.synchronize(device)
        began = time.perf_counter()
        result = do()
        torch.cuda.synchronize(device)
        self.say(name, True, time.perf_counter() - began)
        return result


def checks(device: torch.device, others: Sequence[torch.device], num_bytes: int) -> bool:
    sender = Sender(device, num_bytes)
    report = Report(sum(tensor.nbytes for tensor in sender.source.parameters()))
    for attempt in ("first", "second"):
        report.timed(
            f"a copy on the card, for comparison, {attempt}",
            lambda: [tensor.clone() for tensor in sender.source.parameters()],
            device,
        )
    torch.cuda.empty_cache()
    free_at_first = torch.cuda.mem_get_info(device)[0]
    for attempt in ("first", "second", "third"):
        packed = report.timed(f"pack, {attempt}", sender.pack, device)
        report.say("its numbers are finite", packed.not_finite is None)
        if attempt != "third":
            packed.memory.free()
    to_the_host(report, packed)
    for other in others:
        served(report, "same card" if other == device else "another card", other, sender, packed, num_bytes)
    packed.memory.free()
    torch.cuda.empty_cache()
    left = free_at_first - torch.cuda.mem_get_info(device)[0]
    report.say("all memory of the sender is given back", left < 64 << 20, bytes=left)
    with torch.no_grad():
        sender.source.p3.data[1, 1] = torch.nan
    packed = sender.pack()
    report.say("a number that is not finite is named", packed.not_finite == "p3", found=packed.not_finite)
    packed.memory.free()
    return report.good


def to_the_host(report: Report, packed) -> None:
    from agentrl.weights.shared import HostCopy

    copy, bytes_B = HostCopy(), packed.memory.bytes_B
    target_B = torch.zeros(len(bytes_B), dtype=torch.uint8)
    for attempt in ("first", "second"):
        report.timed(
            f"to the host, through pinned memory, {attempt}",
            lambda: copy.copy(bytes_B, target_B),
            bytes_B.device,
        )
    report.say("the host has the same bytes", bool(torch.equal(target_B.to(bytes_B.device), bytes_B)))


def served(report: Report, where: str, device: torch.device, sender: Sender, packed, num_bytes: int) -> None:
    server = Process("server", device, num_bytes)
    request = request_of(packed.weights)
    for attempt in ("first", "second", "third"):
        reply = server.ask(request)
        ok = reply["error"] is None and reply["sums"] == sums_of(sender.source)
        report.say(f"load, {where}, {attempt}", ok, reply["seconds"], error=reply["error"])
    refused(report.say, server, packed, request)
    say_given_back(report.say, server, sender, num_bytes, request)
    server.kill()


def refused(say: Callable[..., None], server: Process, packed, request: dict) -> None:
    """Requests that are refused, after which the process still loads."""
    memory = request["memory"]
    hostile = {
        "a handle of zeros": {**memory, "cuda": "00" * 64},
        "a short handle": {**memory, "cuda": memory["cuda"][:-2]},
        "more bytes than the allocation has": {**memory, "num_bytes": memory["num_bytes"] + (64 << 20)},
    }
    for name, changed in hostile.items():
        reply = server.ask({**request, "memory": changed})
        say(f"{name} is refused", bool(reply["error"]), error=reply["error"])
    packed.memory.bytes_B[12345] ^= 1
    torch.cuda.synchronize()
    reply = server.ask(request)
    say("a damaged byte is found", "other bytes" in str(reply["error"]), error=reply["error"])
    packed.memory.bytes_B[12345] ^= 1
    torch.cuda.synchronize()
    reply = server.ask(request)
    say("the process still loads", reply["error"] is None, error=reply["error"])


def say_given_back(
    say: Callable[..., None], server: Process, sender: Sender, num_bytes: int, request: dict
) -> None:
    """The memory of a rank that was killed."""
    before = server.ask(request)["free"]
    rank = Process("doomed", sender.device, num_bytes)
    rank.kill()
    reply = server.ask(rank.started)
    say("the handle of a killed rank is refused", bool(reply["error"]), error=reply["error"])
    for _ in range(50):
        left = before - (reply := server.ask(request))["free"]
        if left < 64 << 20:
            break
        time.sleep(0.1)
    say("its memory is given back", left < 64 << 20 and reply["error"] is None, bytes=left)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bytes", type=int, default=3 << 30)
    parser.add_argument("--role", choices=ROLES, default="sender")
    parser.add_argument("--device", type=torch.device, default=torch.device("cuda", 0))
    options = parser.parse_args()
    torch.cuda.set_device(options.device)
    if options.role == "server":
        serve(options.device, options.bytes)
    elif options.role == "doomed":
        doomed(options.device, options.bytes)
    else:
        others = [torch.device("cuda", number) for number in range(min(2, torch.cuda.device_count()))]
        sys.exit(not checks(options.device, others, options.bytes))


if __name__ == "__main__":
    main()
