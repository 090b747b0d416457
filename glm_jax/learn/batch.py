"""The learning batch: what the host packs from finished rollouts and the device learns from."""

from __future__ import annotations

import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Float, Int

# Modes of one learning step, traced so that one compiled program serves every stage of a run.
IDLE, SFT, VALUE, RL, DRAFT = 0, 1, 2, 3, 4
MODES = {"idle": IDLE, "sft": SFT, "draft": DRAFT, "value": VALUE, "rl": RL}


@struct.dataclass
class LearnBatch:
    """M micro-batches of R rows of C tokens; a rollout never straddles two micro-batches.

    Everything a loss needs of token t stands at column t: the token, whether the policy sampled it (`trainable`), the
    log-prob under the distribution it was sampled from, and the version of the weights that sampled it. The model's
    output that predicts column t is that of column t - 1, so the first column of a document is never trainable.
    """

    tokens: Int[Array, "M R C"]
    document_ids: Int[Array, "M R C"]  # 0 = padding; equal numbers within a row see each other causally
    version: Int[Array, "M R C"]
    rollout: Int[Array, "M R C"]  # row-local number of the rollout, 0 = padding
    trainable: Bool[Array, "M R C"]
    behaviour_logp: Float[Array, "M R C"]
    reward: Float[Array, "M R C"]  # non-zero only on a rollout's last trainable token
    used: Int[Array, ""]  # micro-batches that hold anything


def empty_batch(micro_batches: int, rows: int, length: int) -> LearnBatch:
    """A batch of padding as numpy arrays, which the host fills in place and the program skips where `used` is 0."""
    shape = (micro_batches, rows, length)
    zeros = lambda dtype: np.zeros(shape, dtype)
    return LearnBatch(
        tokens=zeros(np.int32),
        document_ids=zeros(np.int32),
        version=zeros(np.int32),
        rollout=zeros(np.int32),
        trainable=zeros(np.bool_),
        behaviour_logp=zeros(np.float32),
        reward=zeros(np.float32),
        used=np.zeros((), np.int32),
    )
