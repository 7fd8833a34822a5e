"""The cards of this machine, as a job sees them; on the CPU there are none."""

from __future__ import annotations

import gc

import torch


def synchronize() -> None:
    """Wait for all cards that this process computes on."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def cards() -> int:
    """The cards that this process may use (count)."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def used() -> int:
    """Bytes in use by all processes on the card where they are most; 0 without one."""
    totals = [torch.cuda.mem_get_info(number) for number in range(cards())]
    return max((total - free for free, total in totals), default=0)


def free() -> int:
    """Free bytes of the fullest card; 0 without one."""
    return min((torch.cuda.mem_get_info(number)[0] for number in range(cards())), default=0)


def empty() -> None:
    """Give back what this process has cached on its card."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
