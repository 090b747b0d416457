"""Adding up over micro-batches: gradients and sums of any number of them make exactly one batch's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from glm_jax.learn.config import LearnConfig
from glm_jax.model.config import ModelConfig


class Setup(NamedTuple):
    """The static side of a learning step."""

    model: ModelConfig
    learn: LearnConfig
    temperature: float = 1.0  # of training rollouts: log-probs are of the distribution that they were sampled from
    top_p: float = 1.0


def micro(tree: Any, i: Int[Array, ""]) -> Any:
    """Micro-batch i of arrays [M, R, C]."""
    return jax.tree.map(lambda a: a[i] if a.ndim else a, tree)


def accumulate(used: Int[Array, ""], f: Callable[[Int[Array, ""]], Any], zero: Any) -> Any:
    """zero + Σ_i f(i) over the used micro-batches, leaf by leaf. (Asking f for its shapes would trace it twice.)"""
    return jax.lax.fori_loop(0, used, lambda i, total: jax.tree.map(jnp.add, total, f(i)), zero)


def zeros(names: tuple[str, ...]) -> dict[str, Array]:
    """A figure of 0 for every name."""
    return {name: jnp.zeros((), jnp.float32) for name in names}
