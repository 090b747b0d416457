"""`glm-jax bench critic`: how much of the return a run's critic explains, beside position and prompt length alone."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np

from glm_jax.data.tasks import Task
from glm_jax.data.tokenizer import Tokenizer, tokenizer_of
from glm_jax.host import compose
from glm_jax.host.batches import pack, rollout_document, unpack
from glm_jax.host.config import RunConfig
from glm_jax.host.errors import RunError
from glm_jax.host.measure import desk, newest_step, rounds
from glm_jax.host.passk import LEVEL, RESAMPLES, Estimate
from glm_jax.host.playground import make_tasks
from glm_jax.host.rollouts import TRAIN, UNUSED, Rollout
from glm_jax.host.run import make_plan, restored
from glm_jax.host.sampling import Sampling
from glm_jax.host.workdir import CHECKPOINTS
from glm_jax.io.checkpoints import Checkpoints
from glm_jax.learn.accumulate import Setup
from glm_jax.learn.critic_step import values
from glm_jax.program.round import Program
from glm_jax.program.state import RunState

ALL = "all"


@dataclasses.dataclass(frozen=True)
class Tokens:
    """The trainable tokens of some rollouts, one after the other."""

    rollout: np.ndarray  # number of the token's rollout, from 0
    position: np.ndarray  # in the answer, from 0
    prompt: np.ndarray  # tokens of the prompt
    returns: np.ndarray  # Monte-Carlo: the reward, discounted to the state before the token


@dataclasses.dataclass(frozen=True)
class Row:
    """What is explained of a family's held-out returns, or of all; None where they do not vary."""

    family: str
    rollouts: int
    tokens: int
    reward: float  # mean over rollouts
    critic: Estimate | None
    baseline: Estimate | None
    difference: Estimate | None


def run(config: RunConfig, workdir: Path, rollouts: int, report: Path | None) -> str:
    """The table as text; with `report`, its figures as JSON.

    One rollout of every held-out task is judged. The baseline is fitted on `rollouts` rollouts of training tasks, or as
    many as are held out if that is more. Raises RunError for a workdir without a checkpoint, or one without a critic.
    """
    tokenizer = tokenizer_of(config.model.path)
    step, program, state = _restore(config, workdir, tokenizer)
    tasks = make_tasks(config.tasks)
    compose.check_prompts((*tasks.train, *tasks.eval), tokenizer, config.rollout.window)
    count = max(rollouts, len(tasks.eval))
    fitted_on = [tasks.train[i % len(tasks.train)] for i in range(count)]
    with desk(config, program, state, (*tasks.train, *tasks.eval), tokenizer) as sampling:
        held = sample(sampling, tasks.eval, config.patience)
        fitted = sample(sampling, fitted_on, config.patience)
        params = sampling.device.state.critic.params
    if not held or not fitted:
        raise RunError(
            f"{len(held)} held-out and {len(fitted)} training rollouts have a valid reward; both are needed."
        )
    learned = _values(config, program, params, held)
    gamma = config.learn.gamma
    judged, seen = tokens_of(held, gamma), tokens_of(fitted, gamma)
    baseline, unseen = position_baseline(seen, judged)
    families = sorted({rollout.family for rollout in held})
    family = np.asarray([rollout.family for rollout in held])[judged.rollout]
    rows = []
    for name in (ALL, *(families if len(families) > 1 else ())):
        members = [rollout for rollout in held if name in (ALL, rollout.family)]
        mine = np.isin(family, [rollout.family for rollout in members])
        reward = float(np.mean([rollout.reward for rollout in members]))
        figures = compare(judged.rollout[mine], judged.returns[mine], learned[mine], baseline[mine])
        rows.append(Row(name, len(members), int(mine.sum()), reward, *figures))
    about = {
        "source": f"{workdir} at step {step}",
        "temperature": config.rollout.temperature,
        "held_out_invalid": len(tasks.eval) - len(held),
        "fitted_rollouts": len(fitted),
        "fitted_tokens": len(seen.returns),
        "unseen_tokens": int(unseen.sum()),
    }
    if report is not None:
        everything = about | {"rows": [dataclasses.asdict(row) for row in rows]}
        report.write_text(json.dumps(everything, indent=1) + "\n")
    return table(about, rows)


def sample(sampling: Sampling, tasks: Sequence[Task], patience: float) -> list[Rollout]:
    """One rollout per task, drawn as training draws them; those with a valid reward, in the order of tasks."""
    for number, task in enumerate(tasks):
        sampling.open(task, number, TRAIN)
    found: list[Rollout] = []
    for scored in rounds(sampling, patience):
        valid = [rollout for rollout in scored if rollout.reward is not None]
        sampling.ledger.settle([rollout.id for rollout in valid], UNUSED)
        found += valid
    return sorted(found, key=lambda rollout: rollout.id)


def tokens_of(rollouts: Sequence[Rollout], gamma: float) -> Tokens:
    """Every sampled token with the return that follows it."""
    lengths = [rollout.count for rollout in rollouts]
    number = np.repeat(np.arange(len(rollouts)), lengths)
    position = np.concatenate([np.arange(length) for length in lengths])
    left = np.asarray(lengths)[number] - 1 - position
    prompt = np.asarray([len(rollout.prompt) for rollout in rollouts])[number]
    return Tokens(number, position, prompt, np.asarray([r.reward for r in rollouts])[number] * gamma**left)


def position_baseline(fitted: Tokens, judged: Tokens) -> tuple[np.ndarray, np.ndarray]:
    """What the table of mean returns by (position, prompt length) of `fitted` says of `judged`, token by token.

    Where `fitted` has no such token the mean of the position stands in, and the overall mean where it has not even
    that. The second result marks those tokens.
    """
    positions = 1 + max(fitted.position.max(), judged.position.max())
    cells = lambda tokens: tokens.prompt * positions + tokens.position
    by_cell, known = _means(cells(fitted), fitted.returns, cells(judged))
    by_position, known_position = _means(fitted.position, fitted.returns, judged.position)
    fallback = np.where(known_position, by_position, fitted.returns.mean())
    return np.where(known, by_cell, fallback), ~known


def compare(
    rollout: np.ndarray, returns: np.ndarray, critic: np.ndarray, baseline: np.ndarray
) -> tuple[Estimate | None, Estimate | None, Estimate | None]:
    """Explained variance over all tokens: the critic's, the baseline's, and the first minus the second.

    A rollout's tokens share one reward, so the 95 % intervals are of a bootstrap over whole rollouts (percentiles); the
    baseline's fit is held fixed. None where the returns do not vary.
    """
    _, number = np.unique(rollout, return_inverse=True)
    columns = [np.ones_like(returns)]
    for x in (returns, returns - critic, returns - baseline):
        columns += [x, np.square(x)]
    sums = np.stack([np.bincount(number, column) for column in columns], axis=1)  # a row per rollout
    n = len(sums)
    drawn = np.random.default_rng(0).multinomial(n, np.full(n, 1 / n), size=RESAMPLES)
    return _estimates(sums.sum(0), drawn @ sums)


def _estimates(whole: np.ndarray, resampled: np.ndarray) -> tuple[Estimate | None, ...]:
    def figures(s: np.ndarray) -> np.ndarray:
        mean, square = s[..., 1::2] / s[..., :1], s[..., 2::2] / s[..., :1]
        variance = np.maximum(square - np.square(mean), 0.0)
        of_returns = np.where(variance[..., :1] > 1e-12, variance[..., :1], np.nan)
        explained = 1.0 - variance[..., 1:] / of_returns
        return np.concatenate([explained, explained[..., :1] - explained[..., 1:]], axis=-1)

    values, every = figures(whole), figures(resampled)
    if np.isnan(values).any():
        return None, None, None
    # A resample of a handful of rollouts may hold one return only, which says nothing.
    low, high = np.nanquantile(every, [(1 - LEVEL) / 2, (1 + LEVEL) / 2], axis=0)
    return tuple(Estimate(*map(float, three)) for three in zip(values, low, high, strict=True))


def table(about: dict, rows: Sequence[Row]) -> str:
    """The figures as a person reads them."""
    lines = [
        f"{about['source']}: share of the variance of the return explained, over all sampled tokens of held-out "
        f"rollouts (temperature {about['temperature']:g}).",
        f"baseline: mean return by (position, prompt length), fitted on {about['fitted_rollouts']:,} training rollouts "
        f"({about['fitted_tokens']:,} tokens); held-out tokens without such a place there: {about['unseen_tokens']}.",
        f"95 % intervals: bootstrap over rollouts. Held-out rollouts without a valid reward: "
        f"{about['held_out_invalid']}.",
        "",
        "| held out | rollouts | tokens | mean reward | critic | baseline | critic - baseline |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        baseline = f"{row.baseline.value:.3f}" if row.baseline else "returns do not vary"
        lines.append(
            f"| {row.family} | {row.rollouts:,} | {row.tokens:,} | {row.reward:.3f} | {_interval(row.critic)} | "
            f"{baseline} | {_interval(row.difference)} |"
        )
    return "\n".join(lines)


def _interval(found: Estimate | None) -> str:
    return f"{found.value:.3f} ({found.low:.3f} to {found.high:.3f})" if found else "returns do not vary"


def _means(keys: np.ndarray, x: np.ndarray, wanted: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The mean of x by key, looked up for other keys, and whether each of those occurs."""
    size = 1 + max(keys.max(), wanted.max())
    count, total = np.bincount(keys, minlength=size), np.bincount(keys, x, minlength=size)
    return (total / np.maximum(count, 1))[wanted], count[wanted] > 0


def _restore(config: RunConfig, workdir: Path, tokenizer: Tokenizer) -> tuple[int, Program, RunState]:
    """The newest checkpoint's step, and its policy and critic in a program's state."""
    if config.learn.advantage != "sao":
        raise RunError(
            f"learn.advantage is {config.learn.advantage!r}, which has no critic; only a run with 'sao' has one."
        )
    step = newest_step(config, workdir)
    if step is None:
        raise RunError(f"{workdir} holds no checkpoint: make one with glm-jax train, of the same config.")
    start = make_plan(config).critic_starts_at
    if start is not None and step <= start:
        raise RunError(
            f"the newest checkpoint of {workdir} is of step {step}, and the critic is made from the policy after step "
            f"{start}: train on (value.steps = {config.value.steps}, rl.steps = {config.rl.steps})."
        )
    program = compose.make_program(config, compose.model_config(config, tokenizer))
    with Checkpoints(workdir / CHECKPOINTS, config.checkpoint.keep) as saver:
        return step, program, restored(saver, step, program, config)


def _values(config: RunConfig, program: Program, params: object, rollouts: Sequence[Rollout]) -> np.ndarray:
    """The critic's value of the state before every sampled token, rollout by rollout."""
    setup = Setup(program.model, config.learn, config.rollout.temperature, config.rollout.top_p)
    judge = jax.jit(lambda params, batch: values(params, batch, setup))
    found: dict[int, np.ndarray] = {}
    waiting = [rollout_document(rollout, rollout.reward) for rollout in rollouts]
    while waiting:
        documents = waiting
        batch, waiting = pack(documents, config.shape)
        found |= unpack(np.asarray(judge(params, batch), np.float64), documents)
    return np.concatenate([found[rollout.id] for rollout in rollouts])
