"""Rewards of completions by a user's function, in worker processes."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from glm_jax.envs.pool import NOT_A_NUMBER, Answer, Pool, PoolError

NAMED = 10  # keys named in an error
SCORE = "score"
REMEDY = f"one number, or a dict with a number under {SCORE!r}"


@dataclass(frozen=True)
class Score:
    """A reward, or why there is none. Exactly one of `value` and `cause` is None."""

    value: float | None
    cause: str | None = None  # raised | not_a_number | timed_out | nan | out_of_range | worker_died
    detail: str = ""  # the cause in words
    metrics: dict[str, float] = field(default_factory=dict)  # what else the function told, by name


class RewardPool:
    """Calls `function` (module:function of (completion: str, task: dict) -> reward) in `workers` processes.

    It returns a number, Python's or numpy's, or a dict whose number `score` is the reward; the dict's other numbers are
    metrics.
    Each call has `time_limit` seconds from the moment a worker takes it up. Rewards lie within `bounds`, both ends
    included. See Pool, or what `make` makes in its place, for what happens to calls that do not end well.
    """

    def __init__(
        self,
        function: str,
        workers: int,
        time_limit: float,
        bounds: tuple[float, float] = (0.0, 1.0),
        make: Callable[..., Pool] = Pool,
    ) -> None:
        if not time_limit > 0:
            raise ValueError(f"time_limit is {time_limit}; it has to be a number of seconds above 0")
        if not bounds[0] < bounds[1]:
            raise ValueError(f"bounds is {bounds}; the first has to lie below the second")
        self._function, self._workers, self._time_limit, self._bounds = function, workers, time_limit, bounds
        self._pool = make(function, workers, noun="reward", remedy="set tasks.reward")

    def __enter__(self) -> RewardPool:
        self._pool.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.close()

    def submit(self, key: int, completion: str, task: dict) -> None:
        """Asks for the reward of a completion; `key` names it and must not be outstanding. Never blocks."""
        self._pool.ask(key, (completion, task), self._time_limit)

    def poll(self) -> list[tuple[int, Score]]:
        """What was scored since the last poll or wait, in the order of its end. Never blocks."""
        return [(key, self._judge(answer)) for key, answer in self._pool.take()]

    def wait(self, timeout: float) -> list[tuple[int, Score]]:
        """Blocks until every submitted completion is scored; what was not handed out yet, ordered by key.

        Raises PoolError naming the keys waited for after `timeout` seconds; scores that came by then stay for poll.
        """
        if not self._pool.wait(timeout):
            keys = sorted(self._pool.outstanding)
            more = f" and {len(keys) - NAMED} more" if len(keys) > NAMED else ""
            raise PoolError(
                f"waited {timeout:g} s for {len(keys)} rewards of {self._function}: keys "
                f"{', '.join(map(str, keys[:NAMED]))}{more}; each call may take {self._time_limit:g} s in "
                f"{self._workers} workers: raise the workers, lower the time limit, or wait longer"
            )
        return sorted(self.poll(), key=lambda pair: pair[0])

    def _judge(self, answer: Answer) -> Score:
        value, metrics, cause, detail = answer.value, {}, answer.cause, answer.detail
        low, high = self._bounds
        if isinstance(value, dict):
            metrics = {name: float(v) for name, v in value.items() if name != SCORE and _finite(v)}
            if not isinstance(value.get(SCORE), int | float):
                cause, detail = NOT_A_NUMBER, f"it returned {str(value):.100}, without a number under {SCORE!r}"
            value = value.get(SCORE)
        if cause == NOT_A_NUMBER:
            return Score(None, cause, f"{detail}; let {self._function} return {REMEDY}")
        if cause is not None:
            return Score(None, cause, detail)
        if math.isnan(value):
            return Score(None, "nan", "the reward is NaN")
        if not low <= value <= high:
            return Score(None, "out_of_range", f"the reward is {value:g}; it has to lie in [{low:g}, {high:g}]")
        return Score(float(value), metrics=metrics)


def _finite(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)
