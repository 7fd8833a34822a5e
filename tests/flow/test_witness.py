"""The gradient is a second witness of a run: what its optimizer saw is what the journal records as trained.

A vector has an entry for each episode. Every sample adds 1 to the gradient of its entry, through the
loss. The vector belongs to the policy's optimizer, in a part of its own: SGD whose momentum is 1, so that its
buffer is the sum of all gradients. The trainer saves and loads that buffer with its other state. So the
buffer in a checkpoint is the number of times that each episode was trained on, in the lineage of its weights.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from agentrl.engine.embedded import EmbeddedEngine
from agentrl.errors import UserError
from agentrl.losses import LossOutput, PolicyLoss
from agentrl.records import read_outcomes, reconcile
from agentrl.records.history import attempts
from agentrl.run.audit import audit
from agentrl.run.checkpoints import Checkpoints
from agentrl.trainer.torch.learner import Optimizer
from agentrl.types import Extra, ExtraSpec
from tests.flow.runs import TINY, train
from tests.flow.worlds import Struck

SMALL = {
    **TINY,
    "num_rollout": 6,
    "rollout_batch_size": 4,
    "n_samples_per_prompt": 2,
    "num_steps_per_rollout": 2,
    "max_tokens_per_gpu": 64,
    "eval_interval": 100,
    "eval_episodes": 2,
    "save_interval": 2,
    "use_tensorboard": False,
    "dynamic_sampling_filter_path": "tests.flow.worlds:drop_even_seeds",
    "custom_loss_function_path": "tests.flow.test_witness:witnessed",
}
EPISODE = re.compile(r"g(\d+)-(\d)(?:-retry(\d))?")
SIZE = 20_000


class Witness:
    """The vector of the optimizer that was made last."""

    vector = torch.zeros(SIZE, requires_grad=True)


def entry_of(episode: str) -> int:
    """The entry of a training episode."""
    match = EPISODE.match(episode)
    assert match is not None, episode
    ordinal, sibling, retry = match.groups(default="0")
    return 100 * int(ordinal) + 10 * int(sibling) + int(retry)


def witnessed(outputs, inputs):
    """The policy loss; each sequence adds 1 to the gradient of its episode's entry, and 0 to the loss."""
    output = PolicyLoss()(outputs, inputs)
    entries = inputs.extras["episode"].values % SIZE
    begins = torch.diff(inputs.sequence_N, prepend=torch.tensor([-1])) > 0
    term = Witness.vector[entries[begins]].sum()
    return LossOutput(output.sum + term - term.detach(), output.metrics)


witnessed.extras = {"episode": ExtraSpec("int64", fill=-1)}


@pytest.fixture
def watched(monkeypatch):
    """Engines that give each token the entry of its episode, and optimizers with the vector."""
    generate, construct = EmbeddedEngine.generate, Optimizer.__init__

    async def generated(self, prompt_ids, sampling, *, session):
        completion = await generate(self, prompt_ids, sampling, session=session)
        entry = entry_of(session) if EPISODE.match(session) else -1
        entries = np.full(len(completion.token_ids), entry, np.int64)
        return replace(completion, extras={"episode": Extra.dense(entries, fill=-1)})

    def constructed(self, model, config):
        construct(self, model, config)
        Witness.vector = torch.zeros(SIZE, requires_grad=True)
        counter = torch.optim.SGD([Witness.vector], lr=1.0, momentum=1.0)
        # The trainer clears the gradients of its network; this vector is not a part of that.
        counter.register_step_post_hook(lambda optimizer, *_: optimizer.zero_grad())
        self.parts.append(counter)

    monkeypatch.setattr(EmbeddedEngine, "generate", generated)
    monkeypatch.setattr(Optimizer, "__init__", constructed)


def struck_at(reset: int | None, folder: Path) -> None:
    """Begin or resume the run; it breaks off at a reset."""
    Struck.at, Struck.resets = reset, 0
    if reset is None:
        train("Brittle", folder.parent, folder.name, resume=True, **SMALL)
        return
    with pytest.raises(UserError, match="struck"):
        train("Brittle", folder.parent, folder.name, resume=True, **SMALL)


def lose_newest_checkpoint(folder: Path) -> int:
    """Leave the folder as a kill does before a checkpoint is complete; the step of the one that remains."""
    newest = Checkpoints(folder / "checkpoints", keep=1).newest()
    assert newest is not None
    newest.path.rename(newest.path.with_name(f".{newest.path.name}.coming"))
    before = Checkpoints(folder / "checkpoints", keep=1).newest()
    assert before is not None
    return before.state.step


def optimizer_counts(folder: Path) -> dict[int, float]:
    """How often the optimizer saw each entry, as the newest checkpoint holds it."""
    newest = Checkpoints(folder / "checkpoints", keep=1).newest()
    assert newest is not None
    state = torch.load(Path(newest.trainer) / "policy" / "state.pt", weights_only=True)
    sums = state["optimizers"][-1]["state"][0]["momentum_buffer"]
    return {int(entry): float(sums[entry]) for entry in sums.nonzero().flatten()}


def outcomes(journal: Path) -> list[tuple[str, str, str]]:
    return [outcome for path in sorted(journal.glob("step_*")) for outcome in read_outcomes(path)]


def test_the_optimizer_saw_each_episode_that_the_journal_calls_trained_once_and_no_other(watched, tmp_path):
    folder = tmp_path / "x"
    struck_at(75, folder)
    resumed_from = lose_newest_checkpoint(folder)
    struck_at(20, folder)
    struck_at(None, folder)
    played = outcomes(folder / "trajectories")
    trained = [id for id, outcome, _ in played if outcome == "trained"]
    assert optimizer_counts(folder) == dict.fromkeys(map(entry_of, trained), 1.0)
    assert len(trained) == len(set(trained)) == 6 * 4 * 2
    # The run had all of it: what the filter dropped, failures, and episodes that a restart undid.
    reasons = Counter(reason for _, outcome, reason in played if outcome == "dropped")
    assert reasons["even"] > 0
    assert any("-retry" in id for id in trained)
    assert [attempt.ended for attempt in attempts(folder)] == ["failed", "failed", "finished"]
    assert attempts(folder)[1].resumed_from == resumed_from > 0
    undone = {
        id
        for id, outcome, _ in outcomes(folder / "rolled_back" / "attempt_1" / "trajectories")
        if outcome == "trained"
    }
    assert undone & set(trained)
    assert reconcile(folder).problems == audit(folder).problems == ()


def test_the_optimizer_never_saw_what_over_sampling_and_a_sample_filter_left(watched, tmp_path):
    Struck.at = None
    filters = {
        "over_sampling_batch_size": 6,
        "rollout_sample_filter_path": "tests.flow.worlds:every_second",
    }
    folder = train("Struck", tmp_path, "x", **{**SMALL, **filters, "num_rollout": 2}).folder
    played = outcomes(folder / "trajectories")
    trained = [id for id, outcome, _ in played if outcome == "trained"]
    assert optimizer_counts(folder) == dict.fromkeys(map(entry_of, trained), 1.0)
    reasons = Counter(reason for _, outcome, reason in played if outcome == "dropped")
    assert len(trained) == reasons["sample_filter/second"] == 2 * 4
    assert reasons["over_sampled"] > 0
