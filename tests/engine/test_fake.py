"""Features of only the fake engine: scripted completions, and an import without torch."""

from __future__ import annotations

import subprocess
import sys

from agentrl.engine.fake import FakeEngine
from agentrl.types import Finish
from agentrl.types.seams import Sampling


async def test_a_script_is_recited_and_ends() -> None:
    engine = FakeEngine(answer=lambda prompt: [prompt[-1], 7, 8])
    completion = await engine.generate([1, 2], Sampling(9), session="a")
    assert completion.token_ids.tolist() == [2, 7, 8]
    assert completion.logprobs.tolist() == [0.0, 0.0, 0.0]
    assert completion.finish is Finish.STOP


async def test_a_script_obeys_limits_and_stop_tokens() -> None:
    engine = FakeEngine(answer=lambda _: [4, 5, 6])
    cut = await engine.generate([1], Sampling(2), session="a")
    assert (cut.token_ids.tolist(), cut.finish) == ([4, 5], Finish.LENGTH)
    stopped = await engine.generate([1], Sampling(9, stop_token_ids=(5,)), session="a")
    assert (stopped.token_ids.tolist(), stopped.matched) == ([4, 5], 5)


def test_importing_the_fake_and_the_suite_brings_no_torch() -> None:
    code = (
        "import sys, agentrl.engine, agentrl.engine.fake, agentrl.engine.conformance\n"
        "print(sorted({'torch', 'transformers'} & set(sys.modules)))"
    )
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert process.stdout.strip() == "[]"
