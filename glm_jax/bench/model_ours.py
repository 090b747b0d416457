"""Our side of `bench model`: `glm_jax.generate` on a model folder. Run by glm_jax.bench.model."""

from __future__ import annotations

import resource
import sys
import time

import numpy as np

from glm_jax.bench.duel import cpu_seconds, serve
from glm_jax.bench.shape import LONG, SHORT, timed
from glm_jax.io.hf import load
from glm_jax.rollout.generate import generate as complete


def main(folder: str, size: str) -> None:
    config, params = load(folder)
    rng = np.random.default_rng(0)

    def generate(prompts: int, length: int, new: int) -> None:
        tokens = rng.integers(3, config.vocab_size, (prompts, length)).tolist()
        made = complete(params, config, tokens, new)
        assert all(len(one.tokens) == new for one in made)

    def iteration() -> dict[str, float]:
        figures = timed(SHORT if size == "smoke" else LONG, generate, cpu_seconds)
        return figures | {"peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}

    start = time.monotonic()
    iteration()
    serve(iteration, {"first": time.monotonic() - start})


if __name__ == "__main__":
    main(*sys.argv[1:])
