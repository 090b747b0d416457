"""`glm-jax bench drafts`: what a draft layer foresees after each way of training it, and what that is worth in time."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from glm_jax.data import sft
from glm_jax.data.tasks import make_tasks
from glm_jax.data.tokenizer import Tokenizer, tokenizer_of
from glm_jax.host import compose
from glm_jax.host.batches import pack
from glm_jax.host.config import RunConfig
from glm_jax.host.material import Examples
from glm_jax.host.stages import StageConfig, learning_rate
from glm_jax.learn import draft_step, optimizer, policy_step
from glm_jax.learn.accumulate import Setup
from glm_jax.learn.optimizer import DRAFT, INDEXER, MAIN, Learner
from glm_jax.model import weights
from glm_jax.model.config import ModelConfig
from glm_jax.model.weights import Transformer
from glm_jax.rollout.generate import Completion, generate
from glm_jax.rollout.pace import Pace

LOSSES = ("ce", "tv")
BATCHES = {1: 4, 8: 16, 64: 128}  # prompts that are completed, by how many at once
DRAFTS = (0, 3, 5)


@dataclasses.dataclass(frozen=True)
class Length:
    """Mean tokens of a pass, the one after the drafts included, where all drafts could be made."""

    seed: int
    loss: str  # of the draft stage
    greedy: float
    sampled: float  # at temperature 1
    entropy: float  # of the policy there: mean of -log p over the sampled tokens, in nats
    passes: int


@dataclasses.dataclass(frozen=True)
class Speed:
    """Completed tokens per second, medians of interleaved repeats."""

    batch: int
    drafts: int
    tokens_per_second: float
    against_none: float  # median of the ratios to the same repeat without drafts
    chosen: int  # the depth that the pace had settled on


def run(config: RunConfig, seeds: int, repeats: int, report: Path | None, smoke: bool) -> str:
    """Trains `seeds` models as the config says, the draft stage once by each loss; then times the first by TV.

    `smoke` takes two layers, and the fewest steps and prompts.
    """
    tokenizer = tokenizer_of(config.model.path)
    model = compose.model_config(config, tokenizer)
    if smoke:
        few = lambda stage: dataclasses.replace(stage, steps=2)
        config, seeds, repeats = dataclasses.replace(config, sft=few(config.sft), draft=few(config.draft)), 1, 1
        kinds = {name: getattr(model, name)[:2] for name in ("indexer_types", "mlp_layer_types")}
        model = dataclasses.replace(model, num_hidden_layers=2, **kinds)
    tasks = make_tasks(config.tasks)
    prompts = [tokenizer.encode(task.question) for task in tasks.eval[: 2 if smoke else None]]
    longest = config.rollout.window - max(map(len, prompts))
    examples = sft.examples(tasks.train, tokenizer, config.rollout.window)
    lengths, timed = [], None
    for seed in range(seeds):
        for loss, params in train(config, model, examples, seed).items():
            lengths.append(measure(params, model, prompts, longest, tokenizer, max(DRAFTS), seed, loss))
            timed = params if (seed, loss) == (0, "tv") else timed
    batches, drafts = ({1: 2}, DRAFTS[::2]) if smoke else (BATCHES, DRAFTS)
    speeds = []
    for batch, count in batches.items():
        some = [prompts[i % len(prompts)] for i in range(count)]
        speeds += race(timed, model, some, batch, drafts, longest, tokenizer.stop_ids, repeats)
    if report is not None:
        rows = {"lengths": lengths, "speeds": speeds}
        found = {name: [dataclasses.asdict(row) for row in some] for name, some in rows.items()}
        report.write_text(json.dumps(found, indent=1) + "\n")
    return table(lengths, speeds)


def train(config: RunConfig, model: ModelConfig, found: Sequence[sft.Example], seed: int) -> dict[str, Transformer]:
    """The weights after SFT, in which the draft layer learns too, and a draft stage by each loss on equal batches."""
    setup = Setup(model, config.learn)
    material = Examples(lambda: sft.stream(found, seed), len(found))

    @jax.jit
    def supervised(policy: Learner, batch, lr):
        policy, _ = draft_step.update(policy, batch, lr, setup, "ce")
        return policy_step.update(policy, batch, None, lr, setup)[0]

    def drafting(kind: str):
        return jax.jit(lambda policy, batch, lr: draft_step.update(policy, batch, lr, setup, kind)[0])

    def batches(stage: StageConfig) -> list[Any]:
        made = []
        for _ in range(stage.steps):
            batch, waiting = pack(material.next(stage.batch), config.shape)
            material.keep(waiting)
            made.append(batch)
        return made

    def go(policy: Learner, stage: StageConfig, step: Callable, made: Sequence[Any]) -> Learner:
        for n, batch in enumerate(made):
            policy = step(policy, batch, jnp.float32(learning_rate(stage.policy_lr, n, stage.steps)))
        return policy

    params = weights.init(model, jax.random.key(seed))
    parts = (MAIN, *([INDEXER] if config.learn.indexer_kl > 0 else []), DRAFT)
    policy = optimizer.init(params, optimizer.labels(params), config.learn.policy, parts)
    policy = go(policy, config.sft, supervised, batches(config.sft))
    made = batches(config.draft)
    return {loss: go(policy, config.draft, drafting(loss), made).params for loss in LOSSES}


def measure(
    params: Transformer,
    model: ModelConfig,
    prompts: Sequence[Sequence[int]],
    longest: int,
    tokenizer: Tokenizer,
    depth: int,
    seed: int,
    loss: str,
) -> Length:
    def complete(temperature: float) -> list[Completion]:
        pace = Pace((depth,), fixed=True)
        settings = dict(temperature=temperature, stop=tokenizer.stop_ids, drafts=depth, pace=pace)
        return generate(params, model, prompts, longest, **settings)

    def length(done: Sequence[Completion]) -> float:
        return sum(c.passed for c in done) / max(1, sum(c.passes for c in done))

    greedy, sampled = complete(0.0), complete(1.0)
    entropy = -float(np.mean([logp for c in sampled for logp in c.logp]))
    return Length(seed, loss, length(greedy), length(sampled), entropy, sum(c.passes for c in greedy))


def race(
    params: Transformer,
    model: ModelConfig,
    prompts: Sequence[Sequence[int]],
    batch: int,
    depths: Sequence[int],
    longest: int,
    stop: Sequence[int],
    repeats: int,
) -> list[Speed]:
    """Greedy completions of `prompts`, `batch` at once, with each number of drafts in turns."""
    paces = {drafts: Pace((drafts,) if drafts else ()) for drafts in depths}

    def go(drafts: int) -> float:
        start = time.perf_counter()
        settings = dict(stop=stop, slots_at_once=batch, drafts=drafts, pace=paces[drafts])
        done = generate(params, model, prompts, longest, **settings)
        return sum(len(c.tokens) for c in done) / (time.perf_counter() - start)

    for drafts in depths:
        go(drafts)  # compiles
        while not paces[drafts].settled:
            go(drafts)
    speed: dict[int, list[float]] = {drafts: [] for drafts in depths}
    for _ in range(repeats):
        for drafts in depths:
            speed[drafts].append(go(drafts))
    return [
        Speed(
            batch=batch,
            drafts=drafts,
            tokens_per_second=median(found),
            against_none=median(a / b for a, b in zip(found, speed[0], strict=True)),
            chosen=paces[drafts].best,
        )
        for drafts, found in speed.items()
    ]


def table(lengths: Sequence[Length], speeds: Sequence[Speed]) -> str:
    """The figures as a person reads them."""
    lines = [
        f"Tokens of a pass with {max(DRAFTS)} drafts, the one after them included:",
        "",
        "| seed | draft stage | greedy | temperature 1 | entropy (nats) | passes |",
        "|---|---|---|---|---|---|",
    ]
    for row in lengths:
        figures = f"{row.greedy:.2f} | {row.sampled:.2f} | {row.entropy:.2f} | {row.passes:,}"
        lines.append(f"| {row.seed} | {row.loss} | {figures} |")
    lines += [
        "",
        "Greedy completions (seed 0, tv), with the depth that the pace settles on:",
        "",
        "| batch | drafts | tokens / s | against none | depth |",
        "|---|---|---|---|---|",
    ]
    for row in speeds:
        figures = f"{row.tokens_per_second:,.0f} | {row.against_none:.2f} | {row.chosen}"
        lines.append(f"| {row.batch} | {row.drafts} | {figures} |")
    return "\n".join(lines)
