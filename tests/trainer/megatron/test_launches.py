"""How many kernels a layer of Megatron launches: each operation is one, and so is each compiled graph."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch.profiler import ProfilerActivity, profile, record_function

from agentrl.trainer.loss_inputs import StepInputs
from agentrl.trainer.megatron.config import MegatronConfig
from agentrl.trainer.megatron.model import delta, feed_forward, layers
from agentrl.trainer.megatron.model.shape import shape_of
from agentrl.trainer.plan import Learning
from tests.trainer.megatron.equality import share_of
from tests.trainer.megatron.models import checkpoint_of
from tests.trainer.megatron.test_losses import LOSSES, batch
from tests.trainer.megatron.together import Ranks
from tests.trainer.test_waits import model_with
from tests.trainer.tiny import settings

GRAPH = "compiled graph"
FUSED = {
    layers: ("_heads_of", "_gated"),
    delta: ("_heads_of", "_gated_norm"),
    feed_forward: ("_rms_norm", "gated"),
}
# They change what a tensor looks like, or where its memory is: nothing runs on the card.
VIEWS = """
alias as_strided as_strided_ chunk detach detach_ diagonal empty empty_like empty_strided expand flatten
lift_fresh mH mT movedim narrow new_empty new_empty_strided numpy_T permute promote_types reshape resize_
resolve_conj resolve_neg result_type select set_ slice split split_with_sizes squeeze t to transpose unbind
unflatten unsqueeze view view_as _reshape_alias _unsafe_view
"""


def kernels(events) -> int:
    """The graphs, and the operations outside of them that call no other one."""

    def runs(event) -> bool:
        return event.name.startswith("aten::") and event.name.removeprefix("aten::") not in VIEWS.split()

    def is_in_graph(event) -> bool:
        return event is not None and (event.name == GRAPH or is_in_graph(event.cpu_parent))

    graphs = sum(event.name == GRAPH for event in events)
    return graphs + sum(
        runs(event) and not any(map(runs, event.cpu_children)) and not is_in_graph(event) for event in events
    )


def as_graph(graph, _inputs):
    def run(*args):
        with record_function(GRAPH):
            return graph(*args)

    return make_boxed_func(run)


def launched_by(layout: MegatronConfig, _rank: int, kind: str, num_layers: int, is_compiled: bool) -> int:
    """Runs in a rank: the kernels of a row's forward and backward pass."""
    from agentrl.trainer.megatron.learner import MegatronLearner
    from agentrl.trainer.megatron.model.network import Network
    from agentrl.trainer.megatron.model.outputs import logprobs_of

    for module, names in FUSED.items() if is_compiled else ():
        for name in names:
            plain = getattr(module, name).__wrapped__
            backend = aot_autograd(fw_compiler=as_graph, bw_compiler=as_graph)
            setattr(module, name, torch.compile(plain, backend=backend, dynamic=True))
    model, train_batch = model_with(kind, num_layers), batch("token mean")
    network = Network(shape_of(model.config), layout, bf16=False)
    network.load(checkpoint_of(model).__getitem__)
    learner = MegatronLearner(network, logprobs_of, Learning(LOSSES["grpo"], settings(), 10))
    rows, inputs = share_of(layout, train_batch.samples)[:1], StepInputs(train_batch)

    def learn() -> None:
        learner.passes.learn(rows, lambda row, out: learner._loss(out, inputs.of(row, out)))

    learn()
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        learn()
    return kernels(recorded.events())


@pytest.mark.full
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("kind", "as_it_is", "fused"), [("qwen3", 175, 42), ("qwen3_5_text", 295, 157)])
def test_a_layer_launches_a_fraction_of_its_operations(kind, as_it_is, fused):
    """Of three layers less those of one, the outermost parts cancel."""
    layout, counts = MegatronConfig(actor_num_gpus_per_node=1), []
    for is_compiled in (False, True):
        with Ranks(1) as ranks:
            one, three = (ranks.run(launched_by, layout, kind, n, is_compiled)[0] for n in (1, 3))
        counts.append((three - one) / 2)
    print(kind, counts)
    assert counts[0] >= as_it_is > counts[1]
    assert counts[1] <= fused
