"""The nouns: frozen, complete at birth, checked once here and trusted everywhere else.

Shape suffixes: T tokens of one sequence, G siblings of one group.
Alignment, once for all: `logprobs[t] = log p(token[t] | tokens[<t])` and `loss_mask[0]` is False.
"""

from agentrl.types.arrays import NO_VERSION, Author, BoolArray, FloatArray, IntArray
from agentrl.types.episode import (
    Completion,
    Ending,
    Episode,
    Failure,
    Finish,
    Group,
    Trajectory,
    Turn,
    TurnTokens,
    Verdict,
)
from agentrl.types.training import Credit, Sample, ScoreRole, Scores, TrainBatch
from agentrl.types.world import (
    JSON,
    History,
    Limits,
    Message,
    Observation,
    Restart,
    RewardParts,
    Role,
    Step,
    Task,
    ToolCall,
    call,
    say,
)

__all__ = [
    "JSON",
    "NO_VERSION",
    "Author",
    "BoolArray",
    "Completion",
    "Credit",
    "Ending",
    "Episode",
    "Failure",
    "Finish",
    "FloatArray",
    "Group",
    "History",
    "IntArray",
    "Limits",
    "Message",
    "Observation",
    "Restart",
    "RewardParts",
    "Role",
    "Sample",
    "ScoreRole",
    "Scores",
    "Step",
    "Task",
    "ToolCall",
    "TrainBatch",
    "Trajectory",
    "Turn",
    "TurnTokens",
    "Verdict",
    "call",
    "say",
]
