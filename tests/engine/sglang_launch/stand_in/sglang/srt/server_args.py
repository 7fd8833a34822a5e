"""A few of SGLang's arguments, one of each kind, and `--habit`."""

from __future__ import annotations

import argparse

print("a library that talks while it is imported")


class ServerArgs:
    @staticmethod
    def add_cli_args(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--model-path", "--model", required=True)
        parser.add_argument("--host", default="")
        parser.add_argument("--port", type=int, default=0)
        parser.add_argument("--admin-api-key")
        parser.add_argument("--device", default="")
        parser.add_argument("--weight-version", default="default")
        parser.add_argument("--dtype", default="auto")
        parser.add_argument("--mem-fraction-static", type=float)
        parser.add_argument("--tp-size", "--tensor-parallel-size", type=int)
        parser.add_argument("--attention-backend", choices=["torch_native", "triton"])
        parser.add_argument("--disable-cuda-graph", action="store_true")
        parser.add_argument("--lora-strict-loading", action=argparse.BooleanOptionalAction)
        parser.add_argument("--cuda-graph-bs", type=int, nargs="+")
        parser.add_argument("--cuda-graph-max-bs", type=int)
        parser.add_argument("--max-running-requests", type=int)
        parser.add_argument("--max-total-tokens", type=int)
        parser.add_argument("--disaggregation-mode", choices=["null", "prefill", "decode"], default="null")
        parser.add_argument("--disaggregation-bootstrap-port", type=int)
        parser.add_argument("--custom-weight-loader", nargs="*")
        parser.add_argument("--context-length", type=int)
        parser.add_argument("--nnodes", type=int, default=1)
        parser.add_argument("--node-rank", type=int, default=0)
        parser.add_argument("--dist-init-addr")
        parser.add_argument("--enable-metrics", action="store_true")
        parser.add_argument("--habit", nargs="*", default=[])
