"""Rewards of completions by a user's function, in worker processes."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from glm_jax.envs.pool import Answer, Pool, PoolError

NAMED = 10  # keys named in an error


@dataclass(frozen=True)
class Score:
    """A reward, or why there is none. Exactly one of `value` and `cause` is None."""

    value: float | None
    cause: str | None = None  # raised | timed_out | nan | out_of_range | worker_died
    detail: str = ""  # the cause in words


class RewardPool:
    """Calls `function` (module:function of (completion: str, task: dict) -> float) in `workers` processes.

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
        value = answer.value
        low, high = self._bounds
        if value is None:
            return Score(None, answer.cause, answer.detail)
        if math.isnan(value):
            return Score(None, "nan", "the reward is NaN")
        if not low <= value <= high:
            return Score(None, "out_of_range", f"the reward is {value:g}; it has to lie in [{low:g}, {high:g}]")
        return Score(value)
