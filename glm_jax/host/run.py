"""A run from its config and its workdir: started, resumed, or found to be done."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import jax

from glm_jax.config.strict import fingerprint
from glm_jax.data import sft
from glm_jax.data.tasks import TaskSet
from glm_jax.data.tokenizer import Tokenizer, tokenizer_of
from glm_jax.envs.pool import Pool
from glm_jax.envs.rewards import RewardPool
from glm_jax.host import compose, playground
from glm_jax.host.baselines import Baseline
from glm_jax.host.config import RunConfig
from glm_jax.host.errors import RunError
from glm_jax.host.finish import exported_step, finish
from glm_jax.host.ledger import Ledger
from glm_jax.host.loop import Loop
from glm_jax.host.material import Examples, Prompts
from glm_jax.host.peers import ALONE, Peers
from glm_jax.host.plan import Plan
from glm_jax.host.preemption import Notice
from glm_jax.host.profile import profiled
from glm_jax.host.reporting import Report, Silent
from glm_jax.host.stages import SUPERVISED
from glm_jax.host.workdir import CHECKPOINTS, CONFIG, LEDGER, LOG, check_ledger, check_workdir, flat
from glm_jax.io.checkpoints import Checkpoints, abstract, restore_weights
from glm_jax.model.config import ModelConfig
from glm_jax.program.round import Program
from glm_jax.program.state import RunState
from glm_jax.report.metrics import MetricsWriter
from glm_jax.report.plots import Sample
from glm_jax.report.progress import Progress
from glm_jax.sharding import manifest

logger = logging.getLogger(__name__)

HANDOFF = "handoff.json"  # the manifest of what sampling sees; its checksum is a metric of every round


def train(config: RunConfig, workdir: Path, peers: Peers = ALONE) -> None:
    """Makes the run that `workdir` holds, from its last checkpoint where there is one, and leaves its results there.

    Raises RunError, ConfigError, CheckpointError, DataError or PoolError, each with a message for the person;
    PreemptedError, when SIGTERM has come and the run is to go on elsewhere.
    """
    peers.check_same(flat(config))
    with ExitStack() as stack:
        stack.enter_context(_naming(workdir))
        workdir.mkdir(parents=True, exist_ok=True)
        notice = stack.enter_context(Notice())
        if peers.writes:
            stack.enter_context(_logging(workdir / LOG))
        kept = config.checkpoint
        saver = stack.enter_context(Checkpoints(workdir / CHECKPOINTS, kept.keep, kept.keep_best))
        step, host = saver.newest() or (0, None)
        changed = check_workdir(workdir, config, host)
        if host is not None:
            check_ledger(workdir, step, host)
        if peers.writes:
            _write(workdir / CONFIG, flat(config))
        tokenizer = tokenizer_of(config.model.path)
        model = compose.model_config(config, tokenizer)
        plan = make_plan(config)
        # One that was stopped in its last evaluation is not marked as finished even after it was resumed.
        if host is not None and step == plan.steps:
            exported = peers.of_first(exported_step(workdir) == step)
            if host["finished"] or exported:
                _say_done(config, workdir, model, step, host, peers, exported)
                return
        tasks = playground.make_tasks(config.tasks)
        compose.check_prompts((*tasks.train, *tasks.eval), tokenizer, config.rollout.window)
        program = compose.make_program(config, model)
        if peers.writes:
            _write(workdir / HANDOFF, manifest.plain(manifest.manifest(model, program.mesh)))
        pool = stack.enter_context(compose.make_pool(config, peers))
        examples = _examples(config, tasks, tokenizer, pool, host)
        state = restored(saver, step, program, config) if host else compose.first_state(program, config)
        if config.profile_rounds and peers.writes:
            program = profiled(program, workdir / "profile", config.profile_rounds)
        ledger = Ledger(workdir / LEDGER, host["offset"] if host else 0, kept=peers.writes)
        stack.callback(ledger.file.close)
        report = Silent()
        if peers.writes:
            writer = stack.enter_context(MetricsWriter(workdir, step if host else None))
            report = Report(writer, stack.enter_context(Progress(plan.steps, "train")))
        if host:
            report.say(f"going on from step {step} of {plan.steps} in {workdir}")
            if host["finished"]:
                report.say("the run had ended; what is added is not bit for bit what a longer run would have made")
        for line in changed:
            logger.info("the config has changed: %s", line)
            report.say(f"the config has changed: {line}")
        every_task = (*tasks.train, *tasks.eval)
        sampling = compose.make_sampling(config, program, state, ledger, pool, every_task, tokenizer, peers)
        del state  # the device's from here on: the first round donates it
        prompts = Prompts(tasks.train, config.seed, host["prompts"] if host else 0)
        baseline = Baseline(config.learn.advantage, host["baseline"] if host else ())
        identity = {"config": flat(config), "fingerprint": fingerprint(config)}
        told = lambda: peers.any(notice.given, ledger.file.offset)
        loop = Loop(plan, tasks, sampling, prompts, examples, baseline, saver, report, identity, host, told)
        loop.run()
        report.flush()
        params = sampling.device.state.policy.params
        finish(workdir, plan.steps, model, params, loop.samples, report.say, _source(config), peers.writes)


def make_plan(config: RunConfig) -> Plan:
    """What the loop needs to know of the config."""
    return Plan(
        stages=config.laid_out,
        staleness=config.staleness,
        group=config.group,
        shape=config.shape,
        eval_every=config.eval.every,
        eval_samples=config.eval.samples,
        checkpoint_every=config.checkpoint.every,
        checkpoint_evaluated=config.checkpoint.keep_best > 0,
        wall_time=config.wall_time,
        patience=config.patience,
        deterministic=config.deterministic,
    )


def restored(saver: Checkpoints, step: int, program: Program, config: RunConfig) -> RunState:
    """The state of a checkpoint, on the program's shardings, with an empty sampler."""
    state = program.init(config.seed)
    targets = abstract((state.policy, state.critic))
    for leaf in jax.tree.leaves((state.policy, state.critic)):
        leaf.delete()  # the restored arrays take their place
    policy, critic = saver.restore(step, *targets)
    return state.replace(policy=policy, critic=critic)


def _write(path: Path, values: dict[str, Any]) -> None:
    part = path.with_suffix(".part")
    part.write_text(json.dumps(values, indent=1) + "\n")
    part.replace(path)


def _source(config: RunConfig) -> Path | None:
    return Path(config.model.path) if config.model.path else None


def _examples(
    config: RunConfig, tasks: TaskSet, tokenizer: Tokenizer, pool: RewardPool | Pool, host: dict | None
) -> Examples:
    """The supervised examples, checked now if there is a stage that wants them; transcripts once it begins."""
    wanted = any(stage.name in SUPERVISED for stage in config.laid_out)
    if isinstance(pool, Pool):
        tools, window = config.tools, config.rollout.window
        played = lambda: playground.examples(tasks.train, pool, tokenizer, tools, window, config.patience)
        count = min(tools.transcripts, len(tasks.train)) if wanted else 0
        return Examples(lambda: sft.stream(played(), config.seed), count, host["examples"] if host else None)
    found = sft.examples(tasks.train, tokenizer, config.rollout.window) if wanted else []
    return Examples(lambda: sft.stream(found, config.seed), len(found), host["examples"] if host else None)


@contextmanager
def _naming(workdir: Path) -> Iterator[None]:
    """What the file system refuses within the workdir becomes a RunError that names it."""
    try:
        yield
    except OSError as error:
        if error.filename is None or not Path(os.fsdecode(error.filename)).absolute().is_relative_to(
            workdir.absolute()
        ):
            raise
        raise RunError(
            f"{error.filename}: {error.strerror}. A run keeps its state there: put back what there was, or use another "
            "--workdir."
        ) from error


def _say_done(
    config: RunConfig, workdir: Path, model: ModelConfig, step: int, host: dict, peers: Peers, exported: bool
) -> None:
    """The run was finished before; what it leaves behind is made up for if a kill came between."""
    say = print if peers.writes else Silent().say
    if not exported:
        target = compose.policy_target(compose.make_program(config, model))
        params = restore_weights(workdir / CHECKPOINTS / str(step), target)
        samples = [Sample(**sample) for sample in host["samples"]]
        finish(workdir, step, model, params, samples, say, _source(config), peers.writes)
    say(f"{workdir} holds a finished run of {step} steps: nothing left to do.")


class _logging(logging.FileHandler):
    """Everything that this project logs goes to a file as well, from INFO on."""

    def __enter__(self) -> _logging:
        self.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        logger = logging.getLogger("glm_jax")
        self._level = logger.level
        logger.setLevel(logging.INFO)
        logger.addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        logger = logging.getLogger("glm_jax")
        logger.setLevel(self._level)
        logger.removeHandler(self)
        self.close()
