"""Stand-ins for what the host drives: a program in numpy that obeys inbox and outbox, and a pool of rewards."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
from flax import struct

from glm_jax.data.tasks import Task, TaskSet
from glm_jax.envs.rewards import Score
from glm_jax.host.baselines import Baseline
from glm_jax.host.device import Device
from glm_jax.host.ledger import Ledger
from glm_jax.host.loop import Loop
from glm_jax.host.material import Examples, Prompts
from glm_jax.host.peers import ALONE
from glm_jax.host.plan import Plan
from glm_jax.host.sampling import Draw, Sampling
from glm_jax.host.scoring import Scorer
from glm_jax.host.stages import ScheduleConfig, StageConfig, lay_out
from glm_jax.host.staleness import StalenessConfig
from glm_jax.learn.batch import IDLE, RL, SFT
from glm_jax.program.exchange import Outbox
from glm_jax.rollout.config import RolloutConfig
from glm_jax.rollout.requests import GOES_ON, LENGTH, PARKED, STOP, Log

EOS = 2


@struct.dataclass
class FakeLearner:
    params: dict
    version: np.ndarray


@dataclass(frozen=True)
class FakeState:
    policy: FakeLearner
    critic: FakeLearner
    sampler: dict
    seed: int


@dataclass
class FakeProgram:
    """Samples tokens that hang on (weights, rollout id, position); learns by hashing its batch into its weights.

    Weights, tokens and log-probs depend on every bit of what the host hands over, so a resumed run that differs
    anywhere ends with other weights. Rollouts take `slots` places first come, first served, over `ticks` per round.
    """

    shards: int = 1
    slots: int = 4
    ticks: int = 3
    stop_share: int = 6  # one token in so many is a stop id
    rounds: list[tuple[int, int]] = field(default_factory=list)  # (mode, slots in use after sampling)
    loss: Callable[[int], float] = lambda version: 0.5

    def init(self, seed: int) -> FakeState:
        learner = lambda name: FakeLearner({"w": _hash_floats(name, seed, 8)}, np.asarray(0, np.int32))
        return FakeState(learner("policy"), learner("critic"), {"slots": [], "queue": []}, seed)

    def start_critic(self, state: FakeState) -> FakeState:
        return replace(
            state, critic=FakeLearner({"w": _hash_floats(state.policy.params["w"].tobytes(), 8)}, np.asarray(0))
        )

    def reset_sampler(self, state: FakeState) -> FakeState:
        return replace(state, sampler={"slots": [], "queue": []})

    def round(self, state: FakeState, inbox) -> tuple[FakeState, Outbox]:
        cancelled = set(inbox.cancel.tolist())
        slots = [job for job in state.sampler["slots"] if job["rollout"] not in cancelled]
        queue = [job for job in state.sampler["queue"] if job["rollout"] not in cancelled]
        for row in range(int(inbox.requests.count)):
            job = _job(inbox.requests, row)
            parked = next((j for j in slots if j["rollout"] == job["rollout"] and j["ending"] == PARKED), None)
            queue.append(job) if parked is None else parked.update(job)
        ids = [job["rollout"] for job in slots + queue]
        assert len(set(ids)) == len(ids), "a rollout was sent while it was under way"
        log = Log(
            token=np.zeros((self.ticks, self.slots, 1), np.int32),
            logp=np.zeros((self.ticks, self.slots, 1), np.float32),
            count=np.zeros((self.ticks, self.slots), np.int32),
            drafted=np.zeros((self.ticks, self.slots), np.int32),
            rollout=np.full((self.ticks, self.slots), -1, np.int32),
            ending=np.zeros((self.ticks, self.slots), np.int32),
            version=state.policy.version,
            ticks=np.asarray(self.ticks, np.int32),
        )
        for tick in range(self.ticks):
            while queue and len(slots) < self.slots:
                slots.append(queue.pop(0))
            for slot, job in enumerate(list(slots)):
                if job["ending"] == PARKED:
                    continue
                self._sample(state, job, log, tick, slot)
                if job["ending"] in (STOP, LENGTH):
                    slots.remove(job)
        self.rounds.append((int(inbox.mode), len(slots) + len(queue)))
        state = replace(state, sampler={"slots": slots, "queue": queue})
        state = self._learn(state, inbox)
        idle = (log.rollout < 0).sum() if queue else 0
        metrics = {"policy/loss": np.float32(self.loss(int(state.policy.version))), "critic/loss": np.float32(0.25)}
        metrics |= {"sample/idle": np.float32(idle), "sample/waiting": np.float32(log.rollout.size if queue else 0)}
        return state, Outbox(log, np.asarray([len(queue)], np.int32), metrics, np.zeros(2, np.uint32))

    def _sample(self, state: FakeState, job: dict, log: Log, tick: int, slot: int) -> None:
        digest = _digest(state.policy.params["w"].tobytes(), job["rollout"], tuple(job["tokens"]))
        token = self.token(job, digest)
        job["tokens"].append(token)
        full = len(job["tokens"]) >= job["limit"]
        parks = PARKED if token == job["park"] else GOES_ON
        job["ending"] = STOP if token in job["stop"] else LENGTH if full else parks
        log.token[tick, slot], log.rollout[tick, slot], log.count[tick, slot] = token, job["rollout"], 1
        log.logp[tick, slot] = -np.float32(digest[2] / 7)
        log.ending[tick, slot] = job["ending"]

    def token(self, job: dict, digest: bytes) -> int:
        """What is sampled next; `digest` hangs on weights, rollout and the tokens so far."""
        return EOS if digest[0] % self.stop_share == 0 else 8 + digest[1]

    def _learn(self, state: FakeState, inbox) -> FakeState:
        if inbox.mode == IDLE:
            return state
        batch = inbox.batch
        arrays = [batch.tokens, batch.document_ids, batch.version, batch.rollout, batch.trainable, batch.behaviour_logp]
        parts = [x.tobytes() for x in [*arrays, batch.reward, batch.used, inbox.policy_lr, inbox.critic_lr, inbox.mode]]

        def update(learner: FakeLearner, version: int) -> FakeLearner:
            weights = _hash_floats(learner.params["w"].tobytes(), *parts, 8)
            return FakeLearner({"w": weights}, np.asarray(version, np.int32))

        version = int(state.policy.version)
        if inbox.mode in (SFT, RL):
            state = replace(state, policy=update(state.policy, version + 1))
        return replace(state, critic=update(state.critic, version)) if inbox.mode != SFT else state


class FakePool:
    """Scores after up to `delay` polls, in any order; `score` makes the Score of a key.

    Delays and orders never repeat: what a deterministic run does must not hang on them.
    """

    rng = random.Random(0)

    def __init__(self, score: Callable[[int], tuple[float | None, str | None]] | None = None, delay: int = 0):
        self.score = score or (lambda key: ((key * 7 % 11) / 10, None))
        self.delay, self.jobs = delay, []

    def submit(self, key: int, completion: str, task: dict) -> None:
        self.jobs.append([self.rng.randint(0, self.delay), key])

    def poll(self) -> list:
        for job in self.jobs:
            job[0] -= 1
        done = [key for left, key in self.jobs if left < 0]
        self.jobs = [job for job in self.jobs if job[0] >= 0]
        return [(key, Score(*self.score(key))) for key in self.rng.sample(done, len(done))]

    def wait(self, timeout: float) -> list:
        assert self.jobs, "waits for nothing"
        found = []
        while self.jobs:
            found += self.poll()
        return found


class Rows(list):
    """Keeps rows of metrics as (step, values)."""

    def write(self, step: int, values: dict[str, float]) -> None:
        self.append((step, values))

    def flush(self) -> None:
        pass


class MemorySaver:
    """Keeps checkpoints in memory."""

    def __init__(self):
        self.saved = {}

    def save(self, step, policy, critic, host):
        self.saved[step] = (policy, critic, host)

    def wait(self):
        pass


class Stream:
    """An endless stream of examples with grain's get_state and set_state."""

    def __init__(self, lengths=(3, 5, 4)):
        self.lengths, self.at = lengths, 0

    def __next__(self):
        self.at += 1
        size = self.lengths[self.at % len(self.lengths)]
        return SimpleNamespace(
            prompt=[8 + self.at % 200] * 2, answer=[9] * size + [EOS], own=[True, False] + [True] * (size - 1)
        )

    def get_state(self):
        return {"at": self.at}

    def set_state(self, state):
        self.at = state["at"]


def task(name: str) -> Task:
    return Task(name, question="q" * (1 + len(name) % 3), answer="a", family="fake", entry={})


TASKS = TaskSet(tuple(task(f"train-{i}") for i in range(7)), tuple(task(f"eval-{i}") for i in range(3)), 0)
CAPACITY = RolloutConfig(slots=4, window=12, ticks=3, queue=4, requests=3, prefill_slots=1)


def plan(tau=1, rl=5, batch=4, sft=0, value=0, group=1, on_exceed="wait", **changes) -> Plan:
    schedule = ScheduleConfig(peak=0.1, warmup=2, shape="cosine")
    stage = lambda steps: StageConfig(steps, batch, policy_lr=schedule, critic_lr=schedule)
    stages = lay_out({"sft": stage(sft), "value": stage(value), "rl": stage(rl)})
    base = dict(stages=stages, staleness=StalenessConfig(tau, on_exceed), group=group, shape=(4, 2, 24), eval_every=2)
    rest = dict(
        eval_samples=1,
        checkpoint_every=2,
        checkpoint_evaluated=False,
        wall_time=None,
        patience=30.0,
        deterministic=True,
    )
    return Plan(**{**base, **rest, **changes})


def make_loop(
    workdir: Path,
    plan: Plan,
    *,
    program=None,
    pool=None,
    saver=None,
    rows=None,
    kind="sao",
    restored=None,
    stop=None,
    capacity=CAPACITY,
    environments=None,
    peers=ALONE,
):
    """A loop over doubles. restored: (policy, critic, host) of a checkpoint; environments: makes those of a ledger."""
    program = program or FakeProgram()
    state, host = program.init(0), None
    if restored:
        policy, critic, host = restored
        state = replace(state, policy=policy, critic=critic)
    ledger = Ledger(workdir / "ledger.jsonl", host["offset"] if host else 0)
    device = Device(program, state, capacity, plan.shape, plan.patience, peers=peers)
    every = {t.id: t for t in (*TASKS.train, *TASKS.eval)}
    acting = environments(ledger) if environments else None
    scorer = Scorer(ledger, acting or pool or FakePool(), lambda tokens: "".join(chr(t) for t in tokens), every)
    draw = Draw(capacity.window, 0.7, 0.9, (EOS,))
    sampling = Sampling(ledger, device, scorer, lambda text: [8 + ord(c) % 100 for c in text], draw, acting, peers)
    prompts = Prompts(TASKS.train, seed=1, position=host["prompts"] if host else 0)
    examples = Examples(Stream, count=5, state=host["examples"] if host else None)
    baseline = Baseline(kind, host["baseline"] if host else ())
    rows = Rows() if rows is None else rows
    return Loop(
        plan,
        TASKS,
        sampling,
        prompts,
        examples,
        baseline,
        saver or MemorySaver(),
        rows,
        {},
        host,
        stop or (lambda: False),
    )


def _job(requests, row: int) -> dict:
    length = int(requests.length[row])
    return {
        "rollout": int(requests.rollout[row]),
        "tokens": requests.tokens[row, :length].tolist(),
        "limit": int(requests.limit[row]),
        "stop": set(requests.stop[row].tolist()),
        "park": int(requests.park[row]),
        "ending": GOES_ON,
    }


def _digest(*parts) -> bytes:
    return hashlib.sha256(b"|".join(p if isinstance(p, bytes) else repr(p).encode() for p in parts)).digest()


def _hash_floats(*parts) -> np.ndarray:
    *parts, size = parts
    return np.frombuffer(_digest(*parts), np.uint8)[:size].astype(np.float32)
