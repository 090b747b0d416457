"""The processes of a run: each goes through the whole loop, and they stay in step by telling what one of them knows.

All run the same jitted round over one mesh, each on its own devices with the slots there, and all read its whole
outbox. What follows from that (ledger, batches, inbox) every process works out for itself, and comes to the same. What
does not, goes through `exchange`: rewards and results of tool calls, whose work is divided among the processes' own
workers (host/divided.py), SIGTERM, and times by the clock. It passes through the coordination service of
jax.distributed and not over the devices, where it would wait behind the round under way.

Process 0 alone writes ledger, metrics, log and model folder; all of them write checkpoints. So the workdir has to be a
folder that all of them see.
"""

from __future__ import annotations

import json
from typing import Any

import jax
import numpy as np

from glm_jax.host.errors import RunError, StallError

EXCHANGE = "exchange"


class Peers:
    """The processes of a run, as number `index` of `count` sees them.

    client: of jax.distributed's coordination service; None where a process is alone. limit: seconds that a process
    waits for the others.
    """

    def __init__(self, index: int = 0, count: int = 1, client: Any = None, limit: float = 600.0):
        self.index, self.count, self.client, self.limit = index, count, client, limit
        self._made = 0  # exchanges so far

    @property
    def writes(self) -> bool:
        """Whether this is the process that writes the run's files."""
        return self.index == 0

    def exchange(self, value: Any) -> list[Any]:
        """The JSON values that the processes gave, in the order of their numbers. All have to come.

        Raises StallError where one has not come after `limit` seconds.
        """
        if self.count == 1:
            return [value]
        self._made += 1
        folder = f"{EXCHANGE}/{self._made}"
        self.client.key_value_set(f"{folder}/{self.index}", json.dumps(value, default=_number))
        try:
            self.client.wait_at_barrier(folder, int(self.limit * 1000))
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise
            raise StallError(
                f"process {self.index} waited {self.limit:g} s for the other {self.count - 1} to come to the same "
                "point. If rounds or rewards take that long, raise config.patience."
            ) from error
        found = {key.rpartition("/")[2]: json.loads(text) for key, text in self.client.key_value_dir_get(f"{folder}/")}
        # Who has come here has read all of the exchange before.
        self.client.key_value_delete(f"{EXCHANGE}/{self._made - 1}/{self.index}")
        return [found[str(number)] for number in range(self.count)]

    def of_first(self, value: Any) -> Any:
        """The value that process 0 gave."""
        return self.exchange(value if self.writes else None)[0]

    def any(self, value: bool, mark: int) -> bool:
        """Whether `value` is true in any process. Raises RunError unless all give the same mark."""
        values, marks = zip(*self.exchange([value, mark]), strict=True)
        if len(set(marks)) > 1:
            raise RunError(
                f"the processes are out of step: their ledgers are {', '.join(map(str, marks))} bytes long. All "
                "have to run the same code on the same files."
            )
        return any(values)

    def check_same(self, config: dict[str, Any]) -> None:
        """Raises RunError naming the keys in which the processes' configs (flat) differ."""
        given = self.exchange(config)
        differ = sorted(key for key in config if any(other.get(key) != config[key] for other in given))
        if differ:
            lines = [f"  {key}: {', '.join(repr(other.get(key)) for other in given)}" for key in differ]
            raise RunError("\n".join(["the processes were started with different configs:", *lines]))


ALONE = Peers()


def _number(value: Any) -> float:
    """What a reward function gave may be a number of numpy's."""
    return np.asarray(value).item()
