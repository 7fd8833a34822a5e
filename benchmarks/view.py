"""`agentrl view` with many episodes: the time and memory to write the pages, and the waits of a reader.

The journal is synthetic: groups of 10 that search a corpus in several turns, 1,000 episodes a step. Pages are
written in a process of their own, so that its peak memory is theirs, for a tenth of the episodes, too: memory
is flat if both are alike. Then a real browser opens the pages from the disk.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import numpy as np
from playwright.sync_api import Page

from agentrl.errors import ConfigError
from agentrl.records import lines, members
from agentrl.types import JSON
from benchmarks.browser import browsers, launched
from benchmarks.machine import machine

_RARE: Final = "zyzzyva"
_WRITE: Final = """
import json, resource, sys, time
from pathlib import Path
from agentrl.view.episodes import write_site
began, cpu = time.perf_counter(), time.process_time()
run, out = Path(sys.argv[1]), Path(sys.argv[2])
site = write_site(run, out, title="bench", decoder_of=lambda _: lambda id: f" w{id}")
seconds, cpu_s = time.perf_counter() - began, time.process_time() - cpu
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
sizes = {"episodes": site.num_episodes, "bytes": site.num_bytes}
print(json.dumps({"s": seconds, "cpu_s": cpu_s, "peak_mb": peak / 1024, **sizes}))
"""
# In the page: changes the address and waits until the list shows the result.
_FILTER: Final = """
([hash, mark]) => new Promise((resolve) => {
  const began = performance.now();
  performance.clearMarks();
  location.hash = hash;
  const look = () => {
    const [entry] = performance.getEntriesByName(mark);
    if (!entry) return setTimeout(look, 1);
    resolve({ms: entry.startTime - began, count: document.getElementById("count").textContent});
  };
  look();
})
"""
_LONG_TASKS: Final = """
window.longest = 0;
new PerformanceObserver((list) => {
  for (const entry of list.getEntries()) window.longest = Math.max(window.longest, entry.duration);
}).observe({entryTypes: ["longtask"]});
"""
_FILTERS: Final = {
    "a reward": ("reward=0.5..", "agentrl:filtered"),
    "a tool, an ending and 10 steps": ("tool=search&ending=truncated&step=3..12", "agentrl:filtered"),
    "sorted by tokens": ("sort=-tokens", "agentrl:filtered"),
    "a text of all episodes": ("q=search", "agentrl:searched"),
    "a text of one episode": (f"q={_RARE}", "agentrl:searched"),
}


@dataclass(frozen=True, slots=True)
class ViewLoad:
    """The journal. tokens: of an episode, half of them the policy's (count). repeats: of each wait."""

    episodes: int = 100_000
    tokens: int = 400
    turns: int = 4
    vocab: int = 30_000
    repeats: int = 3


def bench_view(load: ViewLoad | None = None) -> dict[str, JSON]:
    """Write the pages of a journal, and open them.

    Returns:
        summary: seconds, CPU time, peak memory and size of writing; milliseconds of each wait, medians.
        rows: every repeat. settings: of the journal, the browser and the machine.

    Raises:
        ConfigError: this machine has no browser.
    """
    load = load or ViewLoad()
    if not (paths := browsers()):
        raise ConfigError("this benchmark needs a browser: install Debian's package chromium, or Chrome.")
    with TemporaryDirectory(prefix="agentrl-view-") as folder:
        root = Path(folder)
        writes: dict[str, dict[str, float]] = {}
        for name, number in (("tenth", load.episodes // 10), ("all", load.episodes)):
            num_bytes = write_journal(root / name, load, number)
            writes[name] = {**_write_pages(root / name, root / f"pages-{name}"), "journal_bytes": num_bytes}
        index = root / "pages-all" / "index.html"
        waits = [_waits(paths[0], index) for _ in range(load.repeats)]
    medians: dict[str, JSON] = {
        name: float(np.median([row[name] for row in waits])) for name in sorted(waits[0])
    }
    return {
        "summary": {"write": {**writes["all"]}, "write_a_tenth": {**writes["tenth"]}, "waits_ms": medians},
        "rows": [{**row} for row in waits],
        "settings": {**asdict(load), "browser": paths[0], **machine()},
    }


def write_journal(run: Path, load: ViewLoad, number: int) -> int:
    """Write a journal of `number` episodes, 1,000 a step; return its size (bytes)."""
    folder = run / "trajectories"
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    sizes = []
    for step, first in enumerate(range(0, number, 1000), start=1):
        path = folder / f"step_{step:06d}.jsonl.gz"
        ordinals = range(first, min(first + 1000, number))
        size = 0
        for begin in range(0, len(ordinals), 100):
            entries = (_entry(rng, load, ordinal, step) for ordinal in ordinals[begin : begin + 100])
            size = members.append(path, map(lines.to_line, entries), at=size)
        sizes.append(size)
    return sum(sizes)


def _entry(rng: np.random.Generator, load: ViewLoad, ordinal: int, step: int) -> dict[str, object]:
    id, question = f"g{ordinal // 10}-{ordinal % 10}", f"Where was person {ordinal // 10} born?"
    is_right, is_cut = rng.random() < 0.4, rng.random() < 0.1
    parts = {"env": float(is_right), "format": float(rng.random() < 0.9)}
    turns = list(_turns(rng, load, question, step, rare=ordinal == 12_345))
    return {
        "outcome": "trained",
        "advantages": {"agent": [round(float(rng.normal()), 6)]},
        "verdicts": [{"episode_id": id, "scorer": "env", "total": sum(parts.values()), "parts": parts}],
        "episode": {
            "id": id,
            "env_id": "Bench-v0",
            "task": {"id": f"rl/{ordinal // 10}", "prompt": [{"role": "user", "content": question}]},
            "seed": ordinal // 10,
            "limits": {},
            "trajectories": [{"turns": turns}],
            "step_rewards": [None] * (load.turns - 1) + [float(is_right)],
            "ending": "truncated" if is_cut else "completed",
            "counts": {"tool_calls": load.turns - 1},
            "tools": {"search": {"calls": load.turns - 1, "seconds": 0.01}},
            "seconds": 0.5,
        },
    }


def _turns(
    rng: np.random.Generator, load: ViewLoad, question: str, step: int, *, rare: bool
) -> Iterator[dict[str, object]]:
    size = load.tokens // load.turns // 2
    for k in range(load.turns):
        words = " ".join(format(n * 7919, "x") for n in rng.zipf(1.3, size).clip(max=load.vocab).tolist())
        text = f"{words} {_RARE}" if rare else words
        call = {"name": "search", "arguments": {"query": words[:40]}, "raw": f"<search>{words[:40]}</search>"}
        is_last = k == load.turns - 1
        yield {
            "observation": [{"role": "tool" if k else "user", "content": words if k else question}],
            "action": {"role": "assistant", "content": text, "tool_calls": [] if is_last else [call]},
            "step": k,
            "tokens": {
                "world_ids": (rng.zipf(1.2, size).clip(max=load.vocab) - 1).tolist(),
                "completion": {
                    "token_ids": (rng.zipf(1.2, size).clip(max=load.vocab) - 1).tolist(),
                    "logprobs": (-(rng.exponential(0.3, size) ** 2)).round(8).tolist(),
                    "versions": [step] * size,
                    "finish": "stop",
                },
            },
        }


def _write_pages(run: Path, out: Path) -> dict[str, float]:
    done = subprocess.run(
        [sys.executable, "-c", _WRITE, str(run), str(out)], capture_output=True, text=True, check=True
    )
    measured: dict[str, float] = json.loads(done.stdout)
    return measured


def _waits(browser_path: str, index: Path) -> dict[str, float]:
    """The waits of one reader in a new browser (milliseconds), and the longest task of the page."""
    with launched(browser_path) as browser:
        page = browser.new_page()
        page.add_init_script(_LONG_TASKS)
        page.goto(index.as_uri())
        page.wait_for_selector("html[data-state=ready]", state="attached", timeout=120_000)
        first = "performance.getEntriesByName('agentrl:filtered')[0].startTime"
        waits = {"the first list": float(page.evaluate(first)), "all of the list": _now(page)}
        for name, (address, mark) in _FILTERS.items():
            waits[name] = float(page.evaluate(_FILTER, [f"#{address}", mark])["ms"])
        began = time.perf_counter()
        page.evaluate("location.hash = '#view=tokens&episode=step_000001/g0-0'")
        page.wait_for_selector(".block .t")
        waits["an episode"] = 1000 * (time.perf_counter() - began)
        waits["the longest task"] = float(page.evaluate("window.longest"))
        return waits


def _now(page: Page) -> float:
    return float(page.evaluate("performance.now()"))
