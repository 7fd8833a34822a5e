"""Who computes nothing on a card leaves it alone, and still knows it."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from agentrl.processes.gpus import num_gpus, present_gpus
from tests.cards import free_memory

pytestmark = pytest.mark.gpu
ASKED = """
import json, torch
cards = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
print(json.dumps([(card.name, card.total_memory) for card in cards]))
"""
ALONE = """
import agentrl, agentrl.run.dry_run
from agentrl.tools.search import Bm25Index
from agentrl.processes.gpus import present_gpus
Bm25Index(["a card", "a host"]).search("host")
print(len(present_gpus()), flush=True)
input()
"""
NOISE = 64 << 20
"""Bytes; the context of CUDA alone takes several times as much."""


def test_they_are_known_as_cuda_knows_them():
    told = subprocess.run([sys.executable, "-c", ASKED], capture_output=True, text=True, check=True).stdout
    cards = json.loads(told)
    assert [gpu.name for gpu in present_gpus()] == [name for name, _ in cards]
    assert [gpu.memory for gpu in present_gpus()] == [pytest.approx(memory, rel=0.05) for _, memory in cards]
    assert num_gpus() == len(cards)


def test_a_driver_takes_no_memory_of_a_card():
    before = free_memory()
    command = [sys.executable, "-c", ALONE]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as driver:
        assert driver.stdout is not None
        assert int(driver.stdout.readline()) == len(present_gpus())
        assert before - free_memory() < NOISE
        driver.communicate("\n")
    assert driver.returncode == 0
