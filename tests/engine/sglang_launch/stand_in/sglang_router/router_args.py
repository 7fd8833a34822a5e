"""A few of sglang-router's arguments, one of each kind."""

from __future__ import annotations

import argparse


class RouterArgs:
    @staticmethod
    def add_cli_args(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--host", default="")
        parser.add_argument("--port", type=int, default=0)
        parser.add_argument("--worker-urls", nargs="*")
        parser.add_argument("--policy", choices=["random", "cache_aware", "manual"])
        parser.add_argument("--assignment-mode", choices=["random", "min_load"])
        parser.add_argument("--cache-threshold", type=float)
        parser.add_argument("--disable-circuit-breaker", action="store_true")
        parser.add_argument("--disable-retries", action="store_true")
        parser.add_argument("--pd-disaggregation", action="store_true")
