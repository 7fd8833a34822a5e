"""Loss weights: made once for a whole optimizer step, so that no split of it can change the gradient."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from agentrl.types import FloatArray, Sample


def token_mean(samples: Sequence[Sample]) -> tuple[FloatArray, ...]:
    """1 / (loss tokens of all samples) on every loss token, 0 elsewhere; [T] for each sample."""
    num_loss_tokens = sum(int(sample.loss_mask.sum()) for sample in samples)
    weight = np.float32(1.0 / max(num_loss_tokens, 1))
    return tuple(sample.loss_mask.astype(np.float32) * weight for sample in samples)
