"""The interfaces between the parts of the package. A class with these methods is such a part, without a base.

A tool is a typed callable (`agentrl.tools.Tool`) and needs no protocol. Two interfaces are next to their
types: `agentrl.algorithms.advantages.AdvantageEstimator` and `agentrl.losses.Loss`.
"""

from agentrl.types.seams.engine import (
    Engine,
    MemoryTag,
    Policy,
    PolicyClient,
    PolicyClients,
    RunningPolicy,
    Sampling,
)
from agentrl.types.seams.environment import (
    Act,
    Agent,
    Environment,
    EpisodeRenderer,
    MultiAgentEnvironment,
    Renderer,
    Seen,
    Session,
    SingleAgentEnvironment,
    Stops,
    Tokenizer,
    TokenSource,
    ToolSchema,
)
from agentrl.types.seams.trainer import (
    PublishReport,
    StepReport,
    Teacher,
    Trainer,
)
from agentrl.types.seams.weights import (
    AdapterSink,
    Bucket,
    DeviceHandle,
    DevicePart,
    DeviceWeights,
    Snapshot,
    SnapshotSink,
    TensorSpec,
    WeightSink,
    WeightTransaction,
    Work,
)

__all__ = [
    "Act",
    "AdapterSink",
    "Agent",
    "Bucket",
    "DeviceHandle",
    "DevicePart",
    "DeviceWeights",
    "Engine",
    "Environment",
    "EpisodeRenderer",
    "MemoryTag",
    "MultiAgentEnvironment",
    "Policy",
    "PolicyClient",
    "PolicyClients",
    "PublishReport",
    "Renderer",
    "RunningPolicy",
    "Sampling",
    "Seen",
    "Session",
    "SingleAgentEnvironment",
    "Snapshot",
    "SnapshotSink",
    "StepReport",
    "Stops",
    "Teacher",
    "TensorSpec",
    "TokenSource",
    "Tokenizer",
    "ToolSchema",
    "Trainer",
    "WeightSink",
    "WeightTransaction",
    "Work",
]
