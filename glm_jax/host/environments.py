"""Where rollouts act: tool calls go to environment workers and come back as observations, ended attempts as rewards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from glm_jax.data.tokenizer import Tokenizer
from glm_jax.envs import attempts
from glm_jax.envs.agents.chat import ToolCall
from glm_jax.envs.attempts import Place
from glm_jax.envs.pool import Answer, Pool, PoolError
from glm_jax.envs.rewards import Score
from glm_jax.host import calls, monitor
from glm_jax.host.ledger import Ledger
from glm_jax.host.monitor import FLAG, RULES, RuleConfig
from glm_jax.host.rollouts import TRUNCATED, TURNS, Rollout

BOX_DIED = "box_died"  # twice, by itself
VERIFIER = "verifier_error"  # a verdict is missing for a reason that is the verifier's
_GRACE = 60.0  # seconds that a request may take beyond its commands: boxes start, and other requests go first
_SUBMIT = "submit"


@dataclass(frozen=True)
class ToolConfig:
    """Tool calls of rollouts on environments, and the processes that serve them."""

    turns: int = 16  # tool calls of a rollout; the last one is carried out, and ends it
    observation: int = 256  # most tokens of a result that the policy is shown, head and tail
    command_seconds: float = 30.0
    grade_seconds: float = 120.0
    workers: int = 2
    at_once: int = 8  # requests that a worker serves at a time; it keeps more boxes than that
    transcripts: int = 256  # of the oracle, that sft learns from
    monitor: tuple[RuleConfig, ...] = RULES

    def check(self) -> list[str]:
        whole = ("turns", "observation", "workers", "at_once", "transcripts")
        problems = [f"{k} is {getattr(self, k)}; it must be at least 1" for k in whole if getattr(self, k) < 1]
        seconds = ("command_seconds", "grade_seconds")
        return problems + [f"{k} is {getattr(self, k)}; it must be above 0" for k in seconds if getattr(self, k) <= 0]


@dataclass(frozen=True)
class Seen:
    """What came of a call: a text to show, unless the rollout submitted, a rule drops it, or its environment failed.

    rule: the monitor's, where the call fell under one. failed: why there is no environment any more, in place of a
    reward.
    """

    rollout: int
    text: str = ""
    submitted: bool = False
    rule: RuleConfig | None = None
    failed: Score | None = None


@dataclass
class Environments:
    """Calls and verdicts of the rollouts in the ledger. `places` says by a task's id where it is played.

    Everything that a worker needs is in a rollout's tokens: a request names all of its calls so far, so nothing is lost
    with a worker or with this process.
    """

    pool: Pool
    ledger: Ledger
    tokenizer: Tokenizer
    places: dict[str, Place]
    config: ToolConfig
    calling: set[int] = field(default_factory=set)  # rollouts that wait for what a call gives
    _flagged: dict[int, RuleConfig | None] = field(default_factory=dict)
    _seen: list[Seen] = field(default_factory=list)
    _scores: list[tuple[int, Score]] = field(default_factory=list)

    # Calls

    def call(self, rollout: Rollout) -> None:
        """Begins the call that the rollout's last turn ends with; what comes of it is in `seen` later on."""
        self.calling.add(rollout.id)
        try:
            call = self._last(rollout)
        except calls.Malformed as error:
            self._seen.append(Seen(rollout.id, f"error: {error}"))
            return
        rule = monitor.judge(call, self.config.monitor)
        if rule is not None and rule.action != FLAG:
            self._seen.append(Seen(rollout.id, monitor.DUMMY, rule=rule))
        elif call.name == _SUBMIT:
            self._seen.append(Seen(rollout.id, submitted=True, rule=rule))
        else:
            self._flagged[rollout.id] = rule
            self._ask(attempts.CALL, rollout, self.config.command_seconds)

    def seen(self) -> list[Seen]:
        """What came of calls since the last time, by rollout. Never blocks."""
        self._sort()
        found, self._seen = sorted(self._seen, key=lambda seen: seen.rollout), []
        self.calling -= {seen.rollout for seen in found}
        return found

    def await_calls(self, timeout: float) -> None:
        """Blocks until every call has come to something; PoolError after `timeout` seconds."""
        pending = lambda asked: [key for key in asked if key.startswith(attempts.CALL)]
        self._wait(timeout, lambda asked, _: not pending(asked))

    def await_any(self, timeout: float) -> None:
        """Blocks until there is something to take; PoolError after `timeout` seconds."""
        if not self._seen and not self._scores:
            self._wait(timeout, lambda asked, answers: answers > 0)

    def forget(self, rollout: int) -> None:
        """What a call of this rollout still comes to is nobody's: it has ended."""
        self.calling.discard(rollout)
        self._flagged.pop(rollout, None)
        self._seen = [seen for seen in self._seen if seen.rollout != rollout]

    def leave(self, rollout: int) -> None:
        """Gives up a rollout's box."""
        self.pool.leave(rollout, (attempts.LEAVE, rollout, None, (), 0.0))

    # Verdicts: what a Scorer wants of a pool

    def submit(self, key: int, completion: str, task: dict) -> None:
        """Ends the attempt of rollout `key` and has the task's verifier judge it.

        One that used up its tokens or turns gets 0 without (CompactionRL's rule): were it judged, a policy would learn
        that there is no need to submit.
        """
        rollout = self.ledger.live[key]
        if rollout.ending in (*TRUNCATED, TURNS):
            self._scores.append((key, Score(0.0)))
            self.leave(key)
        else:
            self._ask(attempts.GRADE, rollout, self.config.command_seconds, self.config.grade_seconds)

    def poll(self) -> list[tuple[int, Score]]:
        self._sort()
        found, self._scores = self._scores, []
        return found

    def wait(self, timeout: float) -> list[tuple[int, Score]]:
        self._wait(timeout, lambda asked, _: not any(key.startswith(attempts.GRADE) for key in asked))
        return sorted(self.poll(), key=lambda pair: pair[0])

    # Below: the pool's keys are "call 7" and "grade 7".

    def _ask(self, do: str, rollout: Rollout, seconds: float, more: float = 0.0) -> None:
        made = self._made(rollout)
        limit = len(made) * (seconds + _GRACE) + more + _GRACE
        request = (do, rollout.id, self.places[rollout.task], made, seconds)
        self.pool.ask(f"{do} {rollout.id}", request, limit, home=rollout.id)

    def _last(self, rollout: Rollout) -> ToolCall:
        *_, turn = calls.turns(rollout.tokens, rollout.sampled, self.tokenizer)
        return calls.parse(turn, self.tokenizer)

    def _made(self, rollout: Rollout) -> tuple[ToolCall, ...]:
        """The rollout's calls that were, or are now to be, carried out."""
        found = []
        for turn in calls.turns(rollout.tokens, rollout.sampled, self.tokenizer):
            try:
                call = calls.parse(turn, self.tokenizer)
            except calls.Malformed:
                continue
            rule = monitor.judge(call, self.config.monitor)
            if call.name != _SUBMIT and (rule is None or rule.action == FLAG):
                found.append(call)
        return tuple(found)

    def _sort(self) -> None:
        for key, answer in self.pool.take():
            do, _, id = key.partition(" ")
            if do == attempts.GRADE:
                self._scores.append((int(id), _score(answer)))
                self.leave(int(id))
            elif int(id) in self.calling:
                self._seen.append(_seen(int(id), answer, self._flagged.pop(int(id))))

    def _wait(self, timeout: float, done) -> None:
        if not self.pool.wait(timeout, done):
            names = ", ".join(sorted(self.pool.outstanding)[:10])
            raise PoolError(
                f"waited {timeout:g} s for environments: {names}. Lower tools.command_seconds, raise tools.workers, or "
                "wait longer (patience)"
            )


def _seen(rollout: int, answer: Answer, rule: RuleConfig | None) -> Seen:
    if answer.cause is not None or "failed" in answer.value:
        return Seen(rollout, rule=rule, failed=_score(answer))
    return Seen(rollout, answer.value["text"], rule=rule)


def _score(answer: Answer) -> Score:
    if answer.cause is not None:
        return Score(None, answer.cause, answer.detail)
    if "failed" in answer.value:
        return Score(None, BOX_DIED, answer.value["failed"])
    reward, why = answer.value["reward"], answer.value["why"]
    return Score(None, VERIFIER, why) if reward is None else Score(reward)


def transcripts(pool: Pool, places: Sequence[Place], seconds: float, timeout: float) -> list[list[list[str]]]:
    """The oracle's turns at each place, [name, arguments, result], played in boxes and judged there.

    Raises PoolError where one is not rewarded: what is learnt by heart has to be right.
    """
    limit = timeout + len(places) * _GRACE
    for number, place in enumerate(places):
        # Rollouts are numbered from 0 up: these boxes are none of theirs.
        pool.ask(number, (attempts.TRANSCRIPT, -1 - number, place, (), seconds), limit)
    if not pool.wait(limit):
        raise PoolError(f"waited {limit:g} s for {len(places)} transcripts of oracles: {len(pool.outstanding)} lack")
    found = dict(pool.take())
    for number, place in enumerate(places):
        value = found[number].value or {"failed": found[number].detail}
        if value.get("reward") != 1.0:
            why = value.get("failed") or value.get("why")
            raise PoolError(f"{place.folder}, instance {place.index}: the oracle's turns are not rewarded: {why}")
    return [found[number].value["turns"] for number in range(len(places))]
