"""Our side of `bench rl`: the round itself, once sampling and once learning. Run by glm_jax.bench.rl."""

from __future__ import annotations

import sys

import jax
import numpy as np

from glm_jax.bench.duel import cpu_seconds, peak_mib, serve
from glm_jax.bench.shape import FULL, MODEL, SMOKE
from glm_jax.learn.batch import IDLE, RL, LearnBatch, empty_batch
from glm_jax.learn.config import LearnConfig
from glm_jax.model.hf_config import from_hf
from glm_jax.program.exchange import Inbox
from glm_jax.program.round import build
from glm_jax.rollout.config import RolloutConfig
from glm_jax.rollout.requests import Log, Requests, empty_requests
from glm_jax.sharding.mesh import MeshConfig, make_mesh


def main(advantage: str, size: str) -> None:
    work = SMOKE if size == "smoke" else FULL
    count, window = work.completions, work.window
    sizes = RolloutConfig(
        slots=count,
        window=window,
        ticks=work.new,
        queue=count,
        requests=count,
        prefill_slots=min(8, count),
        prefill_chunk=work.prompt,
    )
    learn = LearnConfig(micro_batches=1, rows=count, length=window, advantage=advantage)
    program = build(from_hf(MODEL), sizes, learn, make_mesh(MeshConfig()))
    state = program.init(0)
    rng = np.random.default_rng(0)
    nothing, none = empty_requests(count, window), np.full((count,), -1, np.int32)
    idle = empty_batch(1, count, window)
    first = 0

    def requests(prompts: np.ndarray) -> Requests:
        rows = empty_requests(count, window)
        rows.tokens[:, : work.prompt] = prompts
        rows.length[:] = work.prompt
        rows.rollout[:] = first + np.arange(count)
        return rows.replace(count=np.asarray(count, np.int32))

    def inbox(rows: Requests, batch: LearnBatch, mode: int) -> Inbox:
        rate = np.asarray(1e-6, np.float32)
        return Inbox(rows, none, batch, np.asarray(mode, np.int32), rate, rate, np.zeros((), np.int32))

    def iteration() -> dict[str, float]:
        nonlocal state, first
        prompts = rng.integers(3, 320, (count, work.prompt))
        start = cpu_seconds()
        state, out = program.round(state, inbox(requests(prompts), idle, IDLE))
        log = jax.device_get(out.log)
        sampled = cpu_seconds()
        batch = pack(prompts, log, first, work.prompt)
        first += count
        state, out = program.round(state, inbox(nothing, batch, RL))
        jax.block_until_ready(out)
        end = cpu_seconds()
        return {"sample": sampled - start, "learn": end - sampled, "total": end - start, "peak_mib": peak_mib()}

    iteration()
    serve(iteration)


def pack(prompts: np.ndarray, log: Log, first: int, prompt: int) -> LearnBatch:
    """Every completion a row, rewarded with the share of even tokens."""
    count, window = prompts.shape[0], prompt + log.token.shape[0]
    batch = empty_batch(1, count, window)
    row = log.rollout - first
    columns = np.arange(prompt, window)[:, None]
    batch.tokens[0, :, :prompt] = prompts
    batch.tokens[0, row, columns] = log.token[..., 0]
    batch.behaviour_logp[0, row, columns] = log.logp[..., 0]
    batch.trainable[0, :, prompt:] = True
    batch.document_ids[:], batch.rollout[:] = 1, 1
    batch.reward[0, :, -1] = (batch.tokens[0, :, prompt:] % 2 == 0).mean(axis=1)
    return batch.replace(used=np.asarray(1, np.int32))


if __name__ == "__main__":
    main(*sys.argv[1:])
