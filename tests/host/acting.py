"""Stand-ins for a policy that calls tools, and for the workers that carry the calls out."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from glm_jax.data.tokenizer import ByteTokenizer
from glm_jax.envs.agents.chat import ToolCall
from glm_jax.envs.attempts import CALL, GRADE, LEAVE
from glm_jax.envs.pool import Answer
from glm_jax.host import calls
from glm_jax.host.environments import Environments, ToolConfig
from glm_jax.learn.batch import IDLE, SFT
from glm_jax.rollout.config import RolloutConfig
from tests.host.doubles import EOS, TASKS, FakeProgram

TOKENIZER = ByteTokenizer()
OPEN, CLOSE, ANSWERED = (TOKENIZER.tags[tag] for tag in (calls.OPEN, calls.CLOSE, "</tool_response>"))
ASKED = 8 + ord("q") % 100  # what the questions of TASKS consist of, as make_loop encodes them
ROOM = RolloutConfig(slots=3, window=90, ticks=12, queue=3, requests=4, prefill_slots=1)


def bash(command: str) -> list[int]:
    return calls.write("bash", {"command": command}, TOKENIZER)


@dataclass
class Actor(FakeProgram):
    """Each turn is one of `says`, or by default: most are commands, some submit, some are no calls, some just stop.

    By default what it says hangs on the rollout and every token before the turn, observations included.
    """

    slots: int = 3
    ticks: int = 12
    says: Callable[[int, int], list[int]] | None = None  # (rollout, turn) -> ids

    def token(self, job: dict, digest: bytes) -> int:
        tokens = job["tokens"]
        at = next((i for i, token in enumerate(tokens) if token != ASKED), len(tokens))
        if ANSWERED in tokens:
            at = len(tokens) - tokens[::-1].index(ANSWERED)
        said = tokens[at:]
        turn = sum(token == CLOSE for token in tokens)
        wanted = self.says(job["rollout"], turn) if self.says else self._turn(job["rollout"], tokens[:at])
        return wanted[len(said)]

    def _turn(self, *before: object) -> list[int]:
        kind = hashlib.sha256(repr(before).encode()).digest()
        if kind[0] % 8 == 0:
            return [OPEN, 8 + 97, CLOSE]
        if kind[0] % 8 == 1:
            return calls.write("submit", {}, TOKENIZER)
        return [EOS] if kind[0] % 8 == 2 else bash(chr(97 + kind[1] % 26))

    def _learn(self, state, inbox):
        if inbox.mode not in (IDLE, SFT):
            batch = inbox.batch
            observed = (batch.document_ids > 0) & ~batch.trainable
            assert not (batch.tokens[batch.trainable] == ANSWERED).any(), "an observation is trained"
            assert (batch.behaviour_logp[observed] == 0).all()
            rewarded = batch.reward != 0
            assert batch.trainable[rewarded].all()
        return super()._learn(state, inbox)


@dataclass
class FakeWorkers:
    """Answers as a box would whose files are the commands so far. Delays and orders never repeat."""

    delay: int = 2
    answer: Callable[[str, int, tuple[ToolCall, ...]], Answer | None] = lambda do, rollout, made: None
    asked: list[tuple[str, int, tuple[ToolCall, ...]]] = field(default_factory=list)
    jobs: dict[str, list] = field(default_factory=dict)
    rng: random.Random = field(default_factory=random.Random)

    def ask(self, key, arguments, limit, home):
        do, rollout, place, made, seconds = arguments
        assert key == f"{do} {rollout}" and home == rollout and place == f"place of {self.task(rollout)}"
        assert key not in self.jobs
        self.asked.append((do, rollout, made))
        self.jobs[key] = [self.rng.randint(0, self.delay), self.answer(do, rollout, made) or self._carry_out(do, made)]

    def leave(self, home, arguments):
        assert arguments[:2] == (LEAVE, home)

    def take(self):
        for job in self.jobs.values():
            job[0] -= 1
        done = [key for key, job in self.jobs.items() if job[0] < 0]
        self.rng.shuffle(done)
        return [(key, self.jobs.pop(key)[1]) for key in done]

    def wait(self, timeout, done):
        for job in self.jobs.values():
            job[0] = min(job[0], 0)
        return bool(done(set(), len(self.jobs)))

    @property
    def outstanding(self):
        return list(self.jobs)

    def _carry_out(self, do: str, made: tuple[ToolCall, ...]) -> Answer:
        digest = hashlib.sha256(repr([call.arguments for call in made]).encode())
        if do == GRADE:
            return Answer({"reward": digest.digest()[0] / 255, "why": ""})
        assert do == CALL and made
        return Answer({"text": digest.hexdigest()[:4], "error": False})


def environments(workers: FakeWorkers, config: ToolConfig) -> Callable:
    """Of a ledger, for make_loop."""

    def make(ledger):
        workers.task = lambda rollout: ledger.live[rollout].task
        names = {task.id: f"place of {task.id}" for task in (*TASKS.train, *TASKS.eval)}
        return Environments(workers, ledger, TOKENIZER, names, config)

    return make
