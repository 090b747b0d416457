"""The loop of a run: the host works on the log of round t - 1 while the device runs round t."""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any, NoReturn, Protocol

from glm_jax.data.tasks import TaskSet
from glm_jax.host.acceptance import Acceptance
from glm_jax.host.baselines import Baseline
from glm_jax.host.batches import pack, rollout_document
from glm_jax.host.device import Learning, Outcome
from glm_jax.host.errors import DivergedError, LedgerError, PreemptedError, RunError, StallError
from glm_jax.host.evaluation import SHOWN, Evaluation, as_sample
from glm_jax.host.figures import TICKS, Meter, batch_figures, learning_figures, ledger_figures
from glm_jax.host.goodput import ADMIT, CHECKPOINT, COMPILE, DATA, ENVIRONMENTS, SAMPLE
from glm_jax.host.material import Examples, Prompts
from glm_jax.host.plan import Plan
from glm_jax.host.rollouts import REJECTED, TRAIN, TRAINED, Rollout
from glm_jax.host.sampling import Sampling
from glm_jax.host.stages import RL, SFT, SMOOTHED, SUPERVISED, VALUE, Stage, learning_rate, stage_at
from glm_jax.host.staleness import Choice, Unit, choose, most_units
from glm_jax.io.checkpoints import SCORE
from glm_jax.learn.batch import MODES
from glm_jax.report.plots import Sample

logger = logging.getLogger(__name__)


class Reporter(Protocol):
    """Where rows of metrics go."""

    def write(self, step: int, values: dict[str, float]) -> None: ...
    def flush(self) -> None: ...


class Saver(Protocol):
    """What is used of io.checkpoints.Checkpoints."""

    def save(self, step: int, policy: Any, critic: Any, host: dict) -> None: ...
    def wait(self) -> None: ...


class Loop:
    """A run between two kills. `host` is the host item of the checkpoint it goes on from, or None.

    `told_to_stop()` is asked between two rounds whether the machine is about to be taken away.
    """

    def __init__(
        self,
        plan: Plan,
        tasks: TaskSet,
        sampling: Sampling,
        prompts: Prompts,
        examples: Examples,
        baseline: Baseline,
        saver: Saver,
        reporter: Reporter,
        identity: dict,
        host: dict | None = None,
        told_to_stop: Callable[[], bool] = lambda: False,
    ):
        self.told_to_stop = told_to_stop
        self.plan, self.tasks, self.sampling, self.saver, self.reporter = plan, tasks, sampling, saver, reporter
        self.ledger, self.device, self.scorer = sampling.ledger, sampling.device, sampling.scorer
        self.prompts, self.examples, self.baseline, self.identity = prompts, examples, baseline, identity
        host = host or {}
        self.step = host.get("step", 0)  # learning steps that were dispatched
        self.saved = host.get("step", 0)
        self.evaluated = host.get("evaluated", -1)  # step of the last evaluation
        self.device.round = host.get("round", 0)
        self.device.shards.lengths.restore(host.get("lengths", {}))
        self.meter = Meter(host.get("elapsed", 0.0), host.get("goodput"))
        self.goodput = self.meter.goodput
        self.acceptance = Acceptance()
        self.evaluation: Evaluation | None = None
        self.losses = deque(host.get("losses", ()), maxlen=SMOOTHED)  # of the last SFT steps
        self.samples = [Sample(**sample) for sample in host.get("samples", ())]  # of the last evaluation
        self.score: float | None = None  # mean reward of the last evaluation that this process made
        self.progress = time.monotonic()
        self._told: tuple[int, ...] = ()
        self.sampling.restore_ages(host.get("ages", {}))
        self.sampling.resume()
        self._settle([])

    def run(self) -> None:
        """Goes on until the last step is made, evaluated and saved."""
        try:
            while True:
                if self.told_to_stop():
                    self._stop()
                self._evaluate_if_due()
                if self.evaluation is None:
                    self._save_if_due()
                    if self.step == self.plan.steps:
                        return
                self.turn()
        finally:
            self.ledger.file.flush()
            self.meter.close()

    def turn(self) -> None:
        """Sends one round, and works on the one before it."""
        if self.plan.wall_time is not None:
            self.sampling.cut_overdue(self.plan.wall_time)
        units = self._units()
        learning = None if self.evaluation else self._learning(units)
        with self.goodput.at(ADMIT):
            if self.step < self.plan.steps:
                self._submit(len(units), learning)
            requests = self.sampling.next_requests()
        if learning or requests or self.sampling.on_device:
            self._send(self.device.dispatch, requests, self.sampling.next_cancellations(), learning)
            if len(self.device.pending) > 1:
                self._take(self._collect())
        elif self.device.pending:
            self._take(self._collect())
        elif self.sampling.environments and (self.sampling.environments.calling or self.scorer.waiting):
            with self.goodput.at(ENVIRONMENTS):
                self.sampling.environments.await_any(self.plan.patience)
        elif self.scorer.waiting:
            self._settle(self._await_scores())
        else:
            raise RunError(f"step {self.step}: nothing is in flight, nothing may start, and no batch can be made.")
        self._settle(self._await_scores() if self.plan.deterministic else self.scorer.poll())
        self._observe()
        self.ledger.file.flush()
        self.ledger.audit()
        self._check_progress()

    def _send(self, call: Callable[..., None], *args: Any) -> None:
        """Has the device do something; a call that compiled counts as that."""
        with self.goodput.at(ADMIT):
            count = self.meter.compilations.count
            call(*args)
            if self.meter.compilations.count > count:
                self.goodput.rename(COMPILE)

    def _collect(self) -> Outcome:
        before = self.goodput.seconds[SAMPLE]
        with self.goodput.at(SAMPLE):
            outcome = self.device.collect()
        waited = self.goodput.seconds[SAMPLE] - before
        self.goodput.waited(waited, outcome.metrics.get(TICKS, 0.0), outcome.learning is not None)
        return outcome

    def _await_scores(self) -> list[Rollout]:
        with self.goodput.at(ENVIRONMENTS):
            return self.scorer.wait(self.plan.patience)

    # What the next round learns

    def _learning(self, units: list[Unit]) -> Learning | None:
        """The next step's batch, or None while there is none."""
        stage = stage_at(self.plan.stages, self.step)
        if stage is None:
            return None
        if stage.name in SUPERVISED:
            return self._learn_examples(stage)
        bump = int(stage.name == RL)
        batch = stage.config.batch // self.plan.group
        choice = choose(units, self.device.version, batch, self.plan.staleness, bump)
        self._tell(choice)
        self._drop(choice.drop)
        return self._learn_rollouts(stage, choice.train) if choice.train else None

    def _learn_examples(self, stage: Stage) -> Learning:
        with self.goodput.at(DATA):
            examples = self.examples.next(stage.config.batch)
        batch, waiting = pack(examples, self.plan.shape)
        self.examples.keep(waiting)
        count = stage.config.batch - len(waiting)
        return self._step(stage, batch, {"sft/examples": float(count), "data/epoch": self.examples.epoch})

    def _learn_rollouts(self, stage: Stage, units: Sequence[Unit]) -> Learning:
        rollouts = [self.ledger.live[id] for unit in units for id in unit.members]
        version = self.device.version
        tau = self.plan.staleness.tau
        figures = batch_figures(rollouts, version, tau) | {"data/epoch": self.prompts.epoch}
        if figures["staleness/max"] > tau:
            raise LedgerError(f"a batch holds tokens {figures['staleness/max']:.0f} versions old, but tau is {tau}.")
        pairs = zip(rollouts, self.baseline.advantages(rollouts), strict=True)
        documents = [rollout_document(rollout, advantage) for rollout, advantage in pairs]
        batch, waiting = pack(documents, self.plan.shape)
        if waiting:
            raise RunError(f"{len(waiting)} of {len(documents)} rollouts do not fit a batch of {self.plan.shape}.")
        if not self.plan.eval_samples:
            self.samples = [as_sample(rollout, self.sampling) for rollout in rollouts[:SHOWN]]
        self.ledger.settle([rollout.id for rollout in rollouts], TRAINED, version=version)
        if self.step == self.plan.critic_starts_at and self.device.state.critic is not None:
            self._send(self.device.start_critic)
        return self._step(stage, batch, figures)

    def _step(self, stage: Stage, batch: Any, figures: dict[str, float]) -> Learning:
        done, steps = self.step - stage.start, stage.config.steps
        policy_lr = learning_rate(stage.config.policy_lr, done, steps) if stage.name != VALUE else 0.0
        critic_lr = learning_rate(stage.config.critic_lr, done, steps) if stage.name in (VALUE, RL) else 0.0
        self.step += 1
        self.progress = time.monotonic()
        rates = {"learn/policy_lr": policy_lr, "learn/critic_lr": critic_lr}
        return Learning(self.step, MODES[stage.name], batch, policy_lr, critic_lr, figures | rates)

    # Which rollouts there are

    def _units(self) -> list[Unit]:
        """The training rollouts without a fate, in the units that a batch is counted in."""
        groups: dict[int, list[Rollout]] = {}
        for rollout in self.ledger.live.values():
            if rollout.purpose == TRAIN:
                groups.setdefault(rollout.group if self.plan.group > 1 else rollout.id, []).append(rollout)
        units = []
        for key, members in groups.items():
            ready = all(rollout.ready for rollout in members)
            if ready and self.plan.group > 1 and len(members) == 1:
                # One valid rollout has no other to compare with.
                self.ledger.settle([members[0].id], REJECTED, cause="alone_in_its_group")
                continue
            oldest = min(self.sampling.oldest(rollout) for rollout in members)
            units.append(Unit(key, oldest, ready, tuple(rollout.id for rollout in members)))
        return units

    def _submit(self, units: int, learning: Learning | None) -> None:
        """Opens rollouts while the staleness bound and what is left of the run have room for more."""
        at = self.step - 1 if learning else self.step
        left = self._units_left(at)
        stage = stage_at(self.plan.stages, at)
        if stage is None or stage.name in SUPERVISED:
            return
        later = next((s for s in self.plan.stages if s.start > stage.start), None)
        later_batch = later.config.batch // self.plan.group if later else None
        limit = most_units(stage.config.batch // self.plan.group, self.plan.staleness.tau, later_batch)
        for _ in range(min(limit, left) - units):
            with self.goodput.at(DATA):
                number, task = self.prompts.next()
            for _ in range(self.plan.group):
                self.sampling.open(task, number, TRAIN)

    def _units_left(self, step: int) -> int:
        """Units that steps from `step` on will train."""
        left = 0
        for stage in self.plan.stages:
            if stage.name not in SUPERVISED:
                steps = stage.config.steps - min(stage.config.steps, max(0, step - stage.start))
                left += steps * (stage.config.batch // self.plan.group)
        return left

    def _drop(self, units: Sequence[Unit]) -> None:
        """Rejects rollouts that the next update would push past tau."""
        for unit in units:
            for id in unit.members:
                if self.ledger.live[id].ending is None:
                    self.sampling.cut(id)
            self.ledger.settle(unit.members, REJECTED, cause="stale")

    def _tell(self, choice: Choice) -> None:
        """Says, once per set, which rollouts the next update waits for."""
        names = tuple(id for unit in choice.wait for id in unit.members if not self.ledger.live[id].ready)
        if names and names != self._told:
            shown = ", ".join(map(str, names[:10])) + (" ..." if len(names) > 10 else "")
            bound = self.plan.staleness.tau
            logger.info("step %d waits for %d rollouts: %s (tau = %d)", self.step + 1, len(names), shown, bound)
        self._told = names

    # What comes back

    def _take(self, outcome: Outcome) -> None:
        """Records a round that came back; writes a row of metrics if it learned."""
        if outcome.sampled:
            self.progress = time.monotonic()
        self.meter.add(outcome)
        self.acceptance.add(outcome, self.ledger)
        self.sampling.take(outcome)
        if outcome.learning:
            learning = outcome.learning
            values = learning_figures(outcome.metrics, learning.mode) | learning.figures
            _check_finite(learning.step, values)
            values = self.meter.row() | self.acceptance.row() | ledger_figures(self.ledger.book) | values
            self.reporter.write(learning.step, values)
            if learning.mode == MODES[SFT]:
                self._end_sft_early(values["policy/loss"])

    def _end_sft_early(self, loss: float) -> None:
        """Moves on to the next stage once the loss has come down to what the config asks for."""
        self.losses.append(loss)
        stage = stage_at(self.plan.stages, self.step)
        if stage is None or stage.name != SFT or stage.config.until is None or len(self.losses) < SMOOTHED:
            return
        mean = sum(self.losses) / SMOOTHED
        if mean <= stage.config.until:
            logger.info("sft ends at step %d: its loss is %.4f, until = %g", self.step, mean, stage.config.until)
            self.step = stage.start + stage.config.steps

    def _observe(self) -> None:
        """Hands on what came of tool calls; in deterministic mode once all have come to something."""
        if self.plan.deterministic and self.sampling.environments:
            with self.goodput.at(ENVIRONMENTS):
                self.sampling.environments.await_calls(self.plan.patience)
        if self.sampling.observe():
            self.progress = time.monotonic()

    def _settle(self, scored: Sequence[Rollout]) -> None:
        if scored:
            self.progress = time.monotonic()
        if self.evaluation:
            self.evaluation.take(scored)

    def _check_progress(self) -> None:
        idle = time.monotonic() - self.progress
        if idle > self.plan.patience:
            names = ", ".join(map(str, sorted(self.sampling.on_device | self.sampling.parked)[:10])) or "none"
            raise StallError(
                f"nothing happened for {idle:.0f} s at step {self.step}: no token, no reward, no update. Rollouts on "
                f"the device: {names}; waiting on the host: {len(self.sampling.waiting)}; being scored: "
                f"{sorted(self.scorer.waiting)[:10]}. If rounds or rewards take that long, raise config.patience."
            )

    # Between two steps

    def _evaluate_if_due(self) -> None:
        """Starts the evaluation that is due at this step, or ends the one that is under way."""
        if self.evaluation is None and self._evaluation_due():
            self.evaluation = Evaluation(self.step, self.sampling, self.tasks.eval, self.plan.eval_samples)
        if self.evaluation is not None and self.evaluation.done:
            while self.device.pending:  # the row of this step comes first
                self._take(self._collect())
            figures = self.evaluation.metrics()
            self.reporter.write(self.step, figures | {"time/wall": self.meter.elapsed})
            self.score, self.samples = figures.get("eval/reward"), self.evaluation.shown
            self.evaluated, self.evaluation = self.step, None

    def _evaluation_due(self) -> bool:
        if not self.plan.eval_samples or self.evaluated == self.step:
            return False
        stage = stage_at(self.plan.stages, self.step)
        if stage is None:
            return True
        done = self.step - stage.start
        return stage.name == RL and (done % self.plan.eval_every == 0 if self.plan.eval_every else done == 0)

    def _save_if_due(self) -> None:
        """Saves a checkpoint: the ledger is on the disk before the checkpoint that names its length commits.

        All rounds come back first. In deterministic mode the sampler is then emptied and every live rollout sent again
        from its tokens, as a resumed run does, so that both go on from the same bits.
        """
        last, every = self.step == self.plan.steps, self.plan.checkpoint_every
        evaluated = self.plan.checkpoint_evaluated and self.evaluated == self.step
        if self.saved == self.step or not (last or evaluated or (every and self.step % every == 0)):
            return
        self._save(finished=last)
        if self.plan.deterministic and not last:
            self._send(self.device.reset_sampler)
            self.sampling.resume()

    def _save(self, finished: bool) -> None:
        while self.device.pending:
            self._take(self._collect())
        self.ledger.audit()
        self.reporter.flush()
        policy, critic = self.device.state.policy, self.device.state.critic
        with self.goodput.at(CHECKPOINT):
            self.saver.save(self.step, policy, critic, self._host(finished))
        self.saved = self.step

    def _stop(self) -> NoReturn:
        """Leaves a checkpoint and raises PreemptedError.

        An evaluation under way is given up, and made again by the resumed run. In deterministic mode nothing is saved:
        a checkpoint at any other step than the unbroken run's would change the bits.
        """
        if not self.plan.deterministic and self.saved != self.step:
            if self.evaluation is not None:
                self.evaluation.give_up()
                self.evaluation = None
            self._save(finished=False)
        self.saver.wait()
        kept = f"step {self.saved} is kept" if self.saved else "nothing was kept yet"
        raise PreemptedError(
            f"told to stop (SIGTERM) at step {self.step}; {kept}. The same command goes on from there."
        )

    def _host(self, finished: bool) -> dict:
        """The host item of a checkpoint."""
        return {
            **self.identity,
            "finished": finished,
            "step": self.step,
            "evaluated": self.evaluated,
            SCORE: self.score if self.evaluated == self.step else None,
            "offset": self.ledger.file.sync(),
            "round": self.device.round,
            "version": self.device.version,
            "ages": {} if self.plan.wall_time is None else self.sampling.ages(),
            "lengths": self.device.shards.lengths.state(),
            "next_rollout": self.ledger.book.submitted,
            "prompts": self.prompts.position,
            "examples": self.examples.state(),
            "baseline": self.baseline.state(),
            "losses": list(self.losses),
            "elapsed": self.meter.elapsed,
            "goodput": dict(self.goodput.seconds),
            "samples": [asdict(sample) for sample in self.samples],
        }


def _check_finite(step: int, values: dict[str, float]) -> None:
    """Raises DivergedError for a loss or gradient norm that is not finite."""
    vital = {name: value for name, value in values.items() if "loss" in name or "norm" in name}
    if bad := [f"{name} = {value}" for name, value in vital.items() if not math.isfinite(value)]:
        shown = ", ".join(bad)
        raise DivergedError(
            f"step {step}: {shown}. The run stops here; its last checkpoint is from before. Lower the learning rate "
            "or the clipping norm and start in a new --workdir."
        )
