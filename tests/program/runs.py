"""Runs the real program on any mesh through every mode, as a host would, and keeps what came back."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np

from glm_jax.learn.batch import IDLE, RL, SFT, VALUE, LearnBatch, empty_batch
from glm_jax.learn.config import LearnConfig, OptimizerConfig
from glm_jax.model.config import ModelConfig
from glm_jax.program.exchange import Inbox
from glm_jax.program.round import Program, build
from glm_jax.program.state import RunState
from glm_jax.rollout.config import RolloutConfig
from glm_jax.rollout.log import read_log
from glm_jax.rollout.pages import no_offer
from glm_jax.rollout.requests import Log, empty_requests
from glm_jax.sharding.mesh import MeshConfig, make_mesh
from tests.model.tiny import named_leaves, random_params, three_layers

MODEL = three_layers()
ROLLOUT = RolloutConfig(
    slots=8, window=24, ticks=12, queue=16, requests=16, prefill_slots=4, prefill_chunk=4, temperature=0.8, top_p=0.9
)
# A wide epsilon: with the usual one a first step is the gradient's sign, in which rounding shows where it is near 0.
ADAM = OptimizerConfig(eps=1e-3)
LEARN = LearnConfig(micro_batches=2, rows=8, length=24, policy=ADAM, critic=ADAM)
LR = 1e-2


def program(axes: dict[str, int], **changes) -> Program:
    parts = dict(model=MODEL, rollout=ROLLOUT, config=LEARN) | changes
    return build(**parts, mesh=make_mesh(MeshConfig(**axes)), params=random_params(parts["model"]))


def inbox(
    requests=(),
    batch: LearnBatch | None = None,
    mode: int = IDLE,
    shards: int = 1,
    sizes: RolloutConfig = ROLLOUT,
) -> Inbox:
    """Each request is (rollout, tokens, limit); the longest go first to the shard that has least to do."""
    rows = empty_requests(sizes.requests, sizes.window, sizes.per_slot)
    rows.temperature[:], rows.top_p[:] = sizes.temperature, sizes.top_p
    for i, (rollout, tokens, limit) in enumerate(requests):
        rows.tokens[i, : len(tokens)], rows.length[i] = tokens, len(tokens)
        rows.rollout[i], rows.limit[i] = rollout, limit
    work = np.zeros(shards)
    for i in np.argsort((rows.length - rows.limit)[: len(requests)], kind="stable"):
        rows.shard[i] = work.argmin()
        work[rows.shard[i]] += rows.limit[i] - rows.length[i]
    return Inbox(
        requests=rows.replace(count=np.int32(len(requests))),
        cancel=np.full(sizes.requests, -1, np.int32),
        batch=batch or empty_batch(LEARN.micro_batches, LEARN.rows, LEARN.length),
        mode=np.int32(mode),
        policy_lr=np.float32(LR),
        critic_lr=np.float32(LR),
        depth=np.int32(max(sizes.drafts, default=0)),
        offer=no_offer(sizes.pool, shards) if sizes.page else None,
    )


def prompts() -> list[tuple[int, list[int], int]]:
    """Twelve rollouts for eight slots, of lengths that make slots free up in mid-round."""
    rng = np.random.default_rng(0)
    made = [rng.integers(1, MODEL.vocab_size, rng.integers(2, 8)).tolist() for _ in range(12)]
    return [(100 + i, p, min(24, len(p) + 5 + 3 * (i % 4))) for i, p in enumerate(made)]


def sampled(logs: list[Log]) -> dict[int, list[tuple[int, float]]]:
    """(token, log-prob) of each rollout."""
    found: dict[int, list[tuple[int, float]]] = {}
    for part in (part for log in logs for part in read_log(log)):
        found.setdefault(part.rollout, []).extend(zip(part.tokens, part.logp, strict=True))
    return found


def to_batch(tokens: dict[int, list[tuple[int, float]]]) -> LearnBatch:
    """The rollouts, one a row over two micro-batches, each with a reward of its own."""
    batch = empty_batch(LEARN.micro_batches, LEARN.rows, LEARN.length)
    for n, (rollout, prompt, _) in enumerate(prompts()):
        m, r = n % 2, n // 2
        ids, logp = zip(*tokens[rollout], strict=True)
        start, end = len(prompt), len(prompt) + len(ids)
        batch.tokens[m, r, :end] = [*prompt, *ids]
        batch.document_ids[m, r, :end] = batch.rollout[m, r, :end] = 1
        batch.trainable[m, r, start:end], batch.behaviour_logp[m, r, start:end] = True, logp
        batch.reward[m, r, end - 1] = np.cos(rollout)
    return batch.replace(used=np.int32(2))


@dataclass
class Run:
    """What a whole run gave."""

    program: Program
    state: RunState | None = None
    logs: list[Log] = field(default_factory=list)
    metrics: list[dict[str, float]] = field(default_factory=list)
    seen: dict[str, RunState] = field(default_factory=dict)  # states as numpy, by the round they followed
    twin: Log | None = None  # of the first RL round, had it not learned
    kept: list[str] = field(default_factory=list)  # leaves of a state that outlived the round it was given to

    def round(self, name: str, box: Inbox) -> None:
        self.state, outbox = self.program.round(self.state, box)
        outbox = jax.device_get(outbox)
        self.logs.append(outbox.log)
        self.metrics.append({k: float(v) for k, v in outbox.metrics.items()})
        self.seen[name] = jax.device_get(self.state)


MODES = ["idle", "idle", "rl", "idle", "sft", "value", "rl", "idle"]


def scenario(program: Program) -> Run:
    """Samples twelve rollouts over two rounds, learns from them by RL, samples on; SFT, a new critic, value, RL."""
    run = Run(program, program.init(3))
    run.seen["start"] = jax.device_get(run.state)
    run.round("sampling", inbox(prompts(), shards=program.shards))
    run.round("still sampling", inbox())
    batch = to_batch(sampled(run.logs))
    # One for each slot: from here on weights change, and tokens hang on when they are sampled.
    more = [(rollout + 100, prompt, limit) for rollout, prompt, limit in prompts()[: ROLLOUT.slots]]
    first = inbox(more, shards=program.shards)
    twin = jax.device_put(jax.tree.map(jnp.copy, run.state), program.shardings)  # an empty array's copy lies elsewhere
    run.twin = jax.device_get(program.round(twin, first)[1].log)
    run.round("rl", inbox(more, batch, RL, program.shards))
    run.round("sampling with new weights", inbox())
    run.round("sft", inbox((), batch, SFT))
    run.state = program.start_critic(run.state)
    run.seen["new critic"] = jax.device_get(run.state)
    run.round("value", inbox((), batch, VALUE))
    run.state = program.reset_sampler(run.state)
    run.seen["reset"] = jax.device_get(run.state)
    run.round("rl again", inbox(more[:3], batch, RL, program.shards))
    run.round("end", inbox())
    # A state that nobody has looked at: on a CPU numpy would share its memory, which then cannot be donated.
    unseen, _ = program.round(run.state, inbox())
    run.state, _ = program.round(unseen, inbox())
    run.kept = [name for name, leaf in named_leaves(unseen).items() if not leaf.is_deleted()]
    return run


@cache
def on_one_device(model: ModelConfig = MODEL) -> Run:
    return scenario(program({}, model=model))
