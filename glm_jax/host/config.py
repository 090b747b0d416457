"""The config of a run: what every room wants to know, in one frozen record, and what only several rooms can tell."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, make_dataclass
from typing import Any, get_type_hints

from glm_jax.config.strict import read
from glm_jax.data.tasks import TaskConfig
from glm_jax.host.environments import ToolConfig
from glm_jax.host.limits import LimitConfig
from glm_jax.host.stages import DRAFT, RL, SFT, STAGES, SUPERVISED, VALUE, Stage, StageConfig, lay_out
from glm_jax.host.staleness import StalenessConfig
from glm_jax.learn.config import LearnConfig
from glm_jax.model.config import PRESETS, ModelConfig
from glm_jax.rollout.config import RolloutConfig
from glm_jax.sharding.mesh import MeshConfig

# The fields of ModelConfig by type alone: what goes together is the whole model's to tell.
_HINTS = get_type_hints(ModelConfig)
_Changes = make_dataclass("Changes", [(f.name, _HINTS[f.name], field(default=f.default)) for f in fields(ModelConfig)])


@dataclass(frozen=True)
class ModelSource:
    """The policy at the start: a preset with new weights, or a model folder in the Hugging Face layout."""

    preset: str | None = None
    changes: dict = field(default_factory=dict)  # fields of ModelConfig that differ from the preset
    path: str | None = None

    def check(self) -> list[str]:
        problems = []
        if (self.preset is None) == (self.path is None):
            problems.append(f"one of preset and path has to be set; preset is {self.preset!r}, path is {self.path!r}")
        if self.preset is not None and self.preset not in PRESETS:
            problems.append(f"preset is {self.preset!r}; known: {', '.join(PRESETS)}")
        if self.path is not None and self.changes:
            problems.append("changes belong to a preset; a model folder says itself what it is")
        if not problems and self.changes:
            try:
                self.of_preset()
            except ValueError as error:  # of the strict reader, the architecture or its schedule
                problems.append(str(error))
        return problems

    def of_preset(self, **unless_changed: Any) -> ModelConfig:
        """The preset with these fields and, over them, the changes. Raises ValueError where it is no model."""
        changes = read(_Changes, self.changes, "changes")
        return PRESETS[self.preset](**{**unless_changed, **{name: getattr(changes, name) for name in self.changes}})


@dataclass(frozen=True)
class EvalConfig:
    """Evaluation on the held-out tasks, at temperature 1."""

    every: int = 50  # RL steps; 0 = only before the first and after the last
    samples: int = 1  # per task; 0 = no evaluation

    def check(self) -> list[str]:
        return _at_least(0, every=self.every, samples=self.samples)


@dataclass(frozen=True)
class CheckpointConfig:
    every: int = 50  # steps; 0 = only at the end
    keep: int = 2  # the last ones
    keep_best: int = 0  # and those of the highest eval/reward; above 0, each evaluation in RL is followed by one

    def check(self) -> list[str]:
        return _at_least(0, every=self.every, keep_best=self.keep_best) + _at_least(1, keep=self.keep)


@dataclass(frozen=True)
class RewardConfig:
    """How rewards are computed; which function does it stands in tasks.reward."""

    workers: int = 1
    time_limit: float = 10.0  # seconds per call
    low: float = 0.0  # rewards outside [low, high] are invalid
    high: float = 1.0

    def check(self) -> list[str]:
        problems = _at_least(1, workers=self.workers)
        if self.time_limit <= 0:
            problems.append(f"time_limit is {self.time_limit}; it counts seconds, so it must be above 0")
        if self.low >= self.high:
            problems.append(f"low is {self.low} and high is {self.high}; low must be below high")
        return problems


@dataclass(frozen=True)
class RunConfig:
    """Everything that decides how a run goes. Two runs of equal configs on the same machine are the same run."""

    model: ModelSource = ModelSource()
    tasks: TaskConfig = TaskConfig()
    stages: tuple[str, ...] = STAGES  # in this order; a stage of 0 steps is left out
    sft: StageConfig = StageConfig()
    draft: StageConfig = StageConfig()  # of the draft layer alone
    value: StageConfig = StageConfig()
    rl: StageConfig = StageConfig()
    rollouts_per_prompt: int = 1
    rollout: RolloutConfig = RolloutConfig()
    limits: LimitConfig = LimitConfig()
    learn: LearnConfig = LearnConfig()
    staleness: StalenessConfig = StalenessConfig()
    reward: RewardConfig = RewardConfig()
    tools: ToolConfig = ToolConfig()  # with tasks.source = environments
    eval: EvalConfig = EvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    mesh: MeshConfig = MeshConfig()
    wall_time: float | None = None  # seconds that a rollout may take, those before a resume included
    patience: float = 600.0  # seconds without any progress after which the run stops
    deterministic: bool = False  # resumed runs end with the same bits as unbroken ones
    profile_rounds: int = 0  # rounds of which a trace for XProf goes to WORKDIR/profile
    seed: int = 0

    @property
    def laid_out(self) -> tuple[Stage, ...]:
        return lay_out({name: getattr(self, name) for name in self.stages if name in STAGES})

    @property
    def group(self) -> int:
        """Rollouts that are trained together or not at all."""
        return self.rollouts_per_prompt if self.learn.advantage == "group" else 1

    @property
    def shape(self) -> tuple[int, int, int]:
        """(M, R, C) of a learning batch."""
        return self.learn.micro_batches, self.learn.rows, self.learn.length

    def check(self) -> list[str]:
        """What only several fields together can tell: one sentence per problem."""
        problems = _at_least(1, rollouts_per_prompt=self.rollouts_per_prompt) + _at_least(0, seed=self.seed)
        problems += _at_least(0, profile_rounds=self.profile_rounds)
        problems += self._check_stages() + self._check_groups() + self._check_sizes()
        if self.patience <= 0:
            problems.append(f"patience is {self.patience}; it counts seconds, so it must be above 0")
        if self.wall_time is not None and self.wall_time <= 0:
            problems.append(f"wall_time is {self.wall_time}; it counts seconds, so it must be above 0, or None")
        if self.checkpoint.keep_best and not self.eval.samples:
            problems.append("checkpoint.keep_best goes by eval/reward, and eval.samples = 0 measures none: raise it")
        if self.deterministic and self.wall_time is not None:
            problems.append("wall_time goes by the clock, which deterministic = True rules out: set it to None")
        return problems

    def _check_stages(self) -> list[str]:
        if unknown := [name for name in self.stages if name not in STAGES]:
            return [f"stages holds {unknown}; known: {', '.join(STAGES)}"]
        if list(self.stages) != [name for name in STAGES if name in self.stages]:
            return [f"stages is {self.stages}; they run in the order {', '.join(STAGES)}, each once"]
        problems = [] if self.laid_out else ["no stage has steps: set rl.steps, value.steps or sft.steps"]
        names = [stage.name for stage in self.laid_out]
        if DRAFT in names and not self.learn.draft_depth:
            problems.append(f"draft.steps is {self.draft.steps}, but learn.draft_depth = 0 drafts nothing: raise it")
        if VALUE in names and self.learn.advantage != "sao":
            problems.append(
                f"value.steps is {self.value.steps}, but learn.advantage = {self.learn.advantage!r} has no critic to "
                "train: set value.steps to 0, or learn.advantage to 'sao'"
            )
        problems += [
            f"{name}.until is {getattr(self, name).until}, but only sft ends by its loss: set it to None"
            for name in (DRAFT, VALUE, RL)
            if getattr(self, name).until is not None
        ]
        rates = {SFT: ["policy_lr"], DRAFT: ["policy_lr"], VALUE: ["critic_lr"], RL: ["policy_lr", "critic_lr"]}
        for stage in self.laid_out:
            for rate in rates[stage.name]:
                if rate == "critic_lr" and self.learn.advantage != "sao":
                    continue
                if getattr(stage.config, rate).peak == 0:
                    problems.append(f"{stage.name}.{rate}.peak is 0, so stage {stage.name} would learn nothing")
        return problems

    def _check_groups(self) -> list[str]:
        n, problems = self.rollouts_per_prompt, []
        if self.learn.advantage == "group" and n == 1:
            problems.append(
                "learn.advantage = 'group' compares the rollouts of one prompt, and rollouts_per_prompt is 1: raise "
                "it, or set learn.advantage to 'sao', which needs one rollout per prompt"
            )
        if self.learn.advantage != "group" and n > 1:
            problems.append(
                f"rollouts_per_prompt is {n}, but learn.advantage = {self.learn.advantage!r} trains rollouts one by "
                "one: set it to 1, or learn.advantage to 'group'"
            )
        for stage in self.laid_out:
            if stage.name not in SUPERVISED and n > 1 and stage.config.batch % n:
                problems.append(
                    f"{stage.name}.batch = {stage.config.batch} is no multiple of rollouts_per_prompt = {n}"
                )
        return problems

    def _check_sizes(self) -> list[str]:
        (micro_batches, rows, length), window, problems = self.shape, self.rollout.window, []
        if window > length:
            problems.append(f"rollout.window = {window} exceeds learn.length = {length}: such a rollout fits no row")
        for stage in self.laid_out:
            holds = micro_batches * rows * (length // window)
            if stage.name not in SUPERVISED and window <= length and stage.config.batch > holds:
                problems.append(
                    f"{stage.name}.batch = {stage.config.batch} rollouts of up to {window} tokens need not fit "
                    f"{micro_batches} x {rows} rows of {length}, which hold {holds}: raise learn.micro_batches (unused "
                    "ones cost nothing), learn.rows or learn.length"
                )
        mesh = self.mesh
        split = (
            ("rollout.slots", self.rollout.slots, "data x stage x fsdp x expert x context", mesh.slots),
            ("learn.rows", rows, "data x stage x fsdp x expert", mesh.rows),
            ("learn.length", length, "context", mesh.context),
        )
        for name, size, axes, ways in split:
            if ways > 0 and size % ways:
                problems.append(
                    f"{name} = {size} cannot be split over {axes} = {ways} devices evenly: change it or the mesh"
                )
        return problems


def _at_least(least: int, **values: int) -> list[str]:
    return [f"{name} is {value}; it must be at least {least}" for name, value in values.items() if value < least]
