"""A world with state, which is learned in a minute: several calls that depend on each other."""

from __future__ import annotations

import random

from agentrl import Limits, Task, ToolEnv, call, say

MODEL = {
    **{"env": "tests.flow.lamps:Lamps", "num_layers": 2, "hidden_size": 64, "ffn_hidden_size": 128},
    **{"num_attention_heads": 4, "num_query_groups": 2, "kv_channels": 16, "vocab_size": 300},
}
START = {
    **{"warm_start_steps": 400, "warm_start_lr": 3e-3, "warm_start_batch_size": 32},
    "num_demonstrations": 512,
}
RL = {
    **{"rollout_batch_size": 16, "n_samples_per_prompt": 8, "num_rollout": 30, "eval_episodes": 256},
    **{"lr_warmup_iters": 0, "lr_decay_style": "constant", "lr": 3e-4},
}


class Lamps(ToolEnv):
    """Make the lamps of a house what they should be; a switch turns an off lamp on and an on lamp off.

    Demonstrations leave four in ten lamps that are wrong as they are. No pair of a house and a goal is in
    both splits.
    """

    limits = Limits(max_turns=10, max_tokens=256)

    def __init__(self) -> None:
        super().__init__()
        self._on = {}

    async def look(self, lamp: str) -> str:
        """See whether a lamp is on."""
        return _state(self._on[lamp]) if lamp in self._on else "no such lamp"

    async def switch(self, lamp: str) -> str:
        """Switch a lamp."""
        if lamp not in self._on:
            return "no such lamp"
        self._on[lamp] = not self._on[lamp]
        return _state(self._on[lamp])

    tools = (look, switch)

    def tasks(self, split):
        pairs = [(start, goal) for start in range(16) for goal in range(16) if start != goal]
        random.Random(0).shuffle(pairs)
        return [
            Task.ask(
                f"{start}-{goal}",
                ", ".join(f"{lamp} {_state(on)}" for lamp, on in _lamps(goal).items()),
                start=start,
                goal=goal,
            )
            for start, goal in (pairs[:200] if split == "train" else pairs[200:])
        ]

    async def reset(self, task, *, seed):
        self._on = _lamps(task.metadata["start"])
        return await super().reset(task, seed=seed)

    def reward(self, task, answer):
        return float(self._on == _lamps(task.metadata["goal"]))

    def expert(self, task):
        """Looks at each lamp, and switches those that are wrong."""
        return self.demonstrator(task, random.Random(0), careless=0.0)

    def demonstrator(self, task, rng, careless=0.4):
        for lamp, on in _lamps(task.metadata["goal"]).items():
            if (yield call("look", lamp=lamp)) != _state(on) and rng.random() >= careless:
                yield call("switch", lamp=lamp)
        yield say("done")


def _state(on):
    return "on" if on else "off"


def _lamps(bits):
    return {lamp: bool(bits >> n & 1) for n, lamp in enumerate(("attic", "bath", "cellar", "hall"))}
