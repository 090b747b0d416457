"""Measures a policy on the held-out tasks, apart from any run, through the same round function."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from glm_jax.data.tasks import Task
from glm_jax.data.tokenizer import Tokenizer, tokenizer_of
from glm_jax.host import compose, playground
from glm_jax.host.config import RunConfig
from glm_jax.host.errors import RunError
from glm_jax.host.evaluation import Evaluation, Result
from glm_jax.host.ledger import Ledger
from glm_jax.host.passk import Estimate, estimate
from glm_jax.host.rollouts import FATES, Rollout
from glm_jax.host.sampling import Sampling
from glm_jax.host.workdir import CHECKPOINTS, check_workdir
from glm_jax.io import hf
from glm_jax.io.checkpoints import Checkpoints, restore_weights
from glm_jax.program.round import Program
from glm_jax.program.state import RunState


@dataclasses.dataclass(frozen=True)
class Measured:
    """What an evaluation found. passes: pass@k by k."""

    source: str  # where the weights came from
    questions: int
    samples: int
    passes: Mapping[int, Estimate]
    metrics: Mapping[str, float]


def measure(config: RunConfig, workdir: Path | None, model: Path | None, samples: int) -> Measured:
    """Samples every held-out task `samples` times and counts the right answers.

    The weights are those of the newest whole checkpoint in `workdir`, or of the model folder `model`. An answer is
    right when it matches exactly; where a task has no answer, when its reward is the highest there is. Answers whose
    reward is invalid count as wrong.
    """
    tokenizer = tokenizer_of(model or config.model.path)
    tasks = playground.make_tasks(config.tasks).eval
    compose.check_prompts(tasks, tokenizer, config.rollout.window)
    source, program, params = _weights(config, workdir, model, tokenizer)
    state = compose.with_policy(program, program.init(config.seed), params)
    with desk(config, program, state, tasks, tokenizer) as sampling:
        evaluation = Evaluation(0, sampling, tasks, samples)
        for scored in rounds(sampling, config.patience, config.wall_time):
            evaluation.take(scored)
        fates = {f"ledger/{fate}": float(sampling.ledger.book.fates[fate]) for fate in FATES}
    right = {task.id: 0 for task in tasks}
    for result in evaluation.results:
        right[result.task] += _right(result, config.reward.high)
    counts = [(samples, right[task.id]) for task in tasks]
    passes = {k: estimate(counts, k) for k in _ks(samples)}
    return Measured(source, len(tasks), samples, passes, evaluation.metrics() | fates)


@contextmanager
def desk(
    config: RunConfig, program: Program, state: RunState, tasks: Sequence[Task], tokenizer: Tokenizer
) -> Iterator[Sampling]:
    """Sampling and scoring of `tasks` apart from any run; the state is donated.

    Nothing of this is kept: the ledger serves the accounting of the rollouts while they run.
    """
    with tempfile.TemporaryDirectory() as folder, compose.make_pool(config) as pool:
        ledger = Ledger(Path(folder) / "ledger.jsonl")
        try:
            sampler = dataclasses.replace(program, round=program.sample)
            yield compose.make_sampling(config, sampler, state, ledger, pool, tasks, tokenizer)
        finally:
            ledger.file.close()


def rounds(sampling: Sampling, patience: float, wall_time: float | None = None) -> Iterator[list[Rollout]]:
    """Rounds without learning until every rollout has its fate: gives those that were scored, for the caller to settle.

    Those without a valid reward have their fate from the scorer. `wall_time`: seconds that a rollout may take.
    """
    device, scorer = sampling.device, sampling.scorer
    while sampling.ledger.live:
        if wall_time is not None:
            sampling.cut_overdue(wall_time)
        requests = sampling.next_requests()
        if requests or sampling.on_device:
            device.dispatch(requests, sampling.next_cancellations(), None)
        if len(device.pending) > 1 or not (requests or sampling.on_device):
            if device.pending:
                sampling.take(device.collect())
            elif sampling.environments:
                sampling.environments.await_any(patience)
            elif scorer.waiting:
                yield scorer.wait(patience)
        sampling.observe()
        yield scorer.poll()
    sampling.ledger.audit()


def newest_step(config: RunConfig, workdir: Path) -> int | None:
    """The newest whole checkpoint of the run in `workdir`, None where it has none; CheckpointError: not this config."""
    if not (workdir / CHECKPOINTS).exists():
        check_workdir(workdir, config)
        return None
    with Checkpoints(workdir / CHECKPOINTS, config.checkpoint.keep) as checkpoints:
        step, host = checkpoints.newest() or (None, None)
    check_workdir(workdir, config, host)
    return step


def _weights(
    config: RunConfig, workdir: Path | None, model: Path | None, tokenizer: Tokenizer
) -> tuple[str, Program, Any]:
    """Where the weights are, the program that samples with them, and the weights."""
    learn = compose.without_critic(config.learn)
    if model is not None:
        architecture = hf.read_config(model)
        compose.check_vocabulary(str(model), architecture, tokenizer)
        program = compose.make_program(config, architecture, learn)
        _, params = hf.load(model, shardings=program.shardings.policy.params)
        return str(model), program, params
    step = newest_step(config, workdir)
    if step is None:
        raise RunError(f"{workdir} holds no checkpoint: train first, or name a model folder with --model.")
    program = compose.make_program(config, compose.model_config(config, tokenizer), learn)
    target = compose.policy_target(program)
    return f"{workdir} at step {step}", program, restore_weights(workdir / CHECKPOINTS / str(step), target)


def _right(result: Result, best: float) -> bool:
    return result.reward >= best if result.exact is None else result.exact


def _ks(samples: int) -> list[int]:
    """1, 2, 4, ... up to the samples, and the samples themselves."""
    powers = [1 << i for i in range(samples.bit_length())]
    return sorted({*(k for k in powers if k <= samples), samples})
