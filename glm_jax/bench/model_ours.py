"""Our side of `bench model`: `glm_jax.generate` on a model folder. Run by glm_jax.bench.model."""

from __future__ import annotations

import sys
import time

import numpy as np

from glm_jax.bench.duel import cpu_seconds, peak_mib, serve
from glm_jax.bench.shape import TEXTS, Text, timed
from glm_jax.io.hf import load
from glm_jax.rollout.generate import generate as complete


def main(folder: str, size: str) -> None:
    config, params = load(folder)
    rng = np.random.default_rng(0)

    def generate(prompts: int, length: int, new: int) -> None:
        tokens = rng.integers(3, config.vocab_size, (prompts, length)).tolist()
        made = complete(params, config, tokens, new, slots_at_once=max(32, prompts))
        assert all(len(one.tokens) == new for one in made)

    text, peak = TEXTS[size], []

    def iteration() -> dict[str, float]:
        figures = timed(text.alone, text.new, generate, cpu_seconds)
        peak.append(peak_mib())  # before many prompts at once, which the peers do not run
        if isinstance(text, Text):
            figures |= timed([(text.batch, text.prompts[0])], text.new, generate, cpu_seconds)
        return figures | {"peak_mib": peak[0]}

    start = time.monotonic()
    iteration()
    serve(iteration, {"first": time.monotonic() - start})


if __name__ == "__main__":
    main(*sys.argv[1:])
