"""HopSearch by an agent of a framework, which is trained as it is: it asks the endpoint of its episode."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence

from agentrl import Limits, Script, Task
from agentrl.envs.gateway import HarnessEnv
from agentrl.tools import inline
from envs_contrib.hop_search import HopSearch

WORLD = HopSearch()


class FrameworkAgent(HarnessEnv):
    """Questions of one and two hops, answered by an agent that searches by itself."""

    limits = Limits(max_turns=5, max_tokens=224, reset_timeout_s=None, step_timeout_s=None)
    # A model that begins with nothing writes tags; leave it out, and a chat model writes its own format.
    dialect = HopSearch.dialect
    breakdown, splits = HopSearch.breakdown, HopSearch.splits
    tools = tuple(WORLD.tool_schemas)

    async def agent(self, base_url: str, key: str, task: Task) -> str | None:
        """What the agent says in the end."""
        # Imported here, so that a run file is checked without the framework, too.
        from examples.framework_agent.searcher import answer

        return await answer(task.prompt[0].text, base_url, key)

    @inline
    def grade(self, task: Task, answer: str, files: Mapping[str, str]) -> float:
        """1.0 for the right name; such an agent has no files."""
        del files
        return WORLD.reward(task, answer)

    def tasks(self, split: str) -> Sequence[Task]:
        """Those of HopSearch."""
        return WORLD.tasks(split)

    def demonstrator(self, task: Task, rng: random.Random) -> Script:
        """For the warm start of a model that begins with nothing."""
        return WORLD.demonstrator(task, rng)

    def corpus(self) -> Iterable[str]:
        """For its tokenizer."""
        return WORLD.corpus()
