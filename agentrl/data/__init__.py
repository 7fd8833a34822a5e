"""Prompts from files, environments and custom sources, each addressed by its number.

source = FileSource("questions.jsonl", Columns("question", "answer"), seed=1)
source.prompt(123_456)                # the same in every process, in any order of the calls
PromptStream(source, 32).next()       # the 33rd prompt of a run
"""

from agentrl.data.bounded import Bounded
from agentrl.data.columns import Columns
from agentrl.data.contract import check_data_source
from agentrl.data.files import FileSource
from agentrl.data.mixture import Mixture
from agentrl.data.source import (
    AdaptiveSource,
    DataSource,
    Prompt,
    PromptStream,
    Skipped,
    TaskSource,
    world_seed,
)

__all__ = [
    "AdaptiveSource",
    "Bounded",
    "Columns",
    "DataSource",
    "FileSource",
    "Mixture",
    "Prompt",
    "PromptStream",
    "Skipped",
    "TaskSource",
    "check_data_source",
    "world_seed",
]
