"""The figures of a run that only the host knows: what a batch held, how long rounds took, where rollouts went."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence

import jax

from glm_jax.host.device import Outcome
from glm_jax.host.goodput import Goodput
from glm_jax.host.ledger import Book
from glm_jax.host.rollouts import FATES, TRUNCATED, Rollout, mean_metrics
from glm_jax.host.staleness import lags
from glm_jax.learn.batch import DRAFT, RL, SFT, VALUE

SAMPLE = "sample/"
# Slots without a token, and all slots, over the ticks in which a request was left waiting.
IDLE, WAITING = "sample/idle", "sample/waiting"
TICKS = "sample/ticks"
REUSED, PREFILLED = "sample/reused", "sample/prefilled"  # prompt tokens whose rows were there, and that were run
# What a mode of learning measures; the program reports 0 for the rest.
MADE = {
    SFT: ("policy/loss", "policy/grad_norm", "policy/entropy", "policy/indexer_kl", "draft/"),
    DRAFT: ("draft/",),
    VALUE: ("critic/",),
    RL: ("critic/", "policy/", "rollout/"),
}


def learning_figures(metrics: dict[str, float], mode: int) -> dict[str, float]:
    """Of what the program measured in a round that learned, the figures that belong to its mode."""
    return {name: value for name, value in metrics.items() if name.startswith(MADE[mode])}


def batch_figures(rollouts: Sequence[Rollout], version: int, tau: int) -> dict[str, float]:
    """Means over a batch's rollouts, and how far their tokens lag behind the weights (`version`) that they train."""
    count = len(rollouts)
    late = Counter(lag for rollout in rollouts for lag in lags(_versions(rollout), version))
    tokens = late.total()
    exact = [rollout.exact for rollout in rollouts if rollout.exact is not None]
    figures = {
        "rollout/reward": sum(rollout.reward for rollout in rollouts) / count,
        "rollout/length": sum(rollout.count for rollout in rollouts) / count,
        "rollout/truncated_share": sum(rollout.ending in TRUNCATED for rollout in rollouts) / count,
        "staleness/mean": sum(lag * n for lag, n in late.items()) / tokens,
        "staleness/max": float(max(late)),
    }
    if turns := sum(rollout.observations for rollout in rollouts):
        figures["rollout/observations"] = turns / count
    if exact:
        figures["rollout/exact_match"] = sum(exact) / len(exact)
    figures |= mean_metrics([rollout.metrics for rollout in rollouts], "rollout/score/")
    return figures | {f"staleness/lag_{lag}": float(late[lag]) for lag in range(tau + 1)}


def _versions(rollout: Rollout) -> list[int]:
    """Of the sampled tokens."""
    return [version for version, sampled in zip(rollout.version, rollout.sampled, strict=True) if sampled]


def ledger_figures(book: Book) -> dict[str, float]:
    """Rollouts by fate and by cause so far, those in flight, and tool calls that the monitor did something about."""
    fates = {f"ledger/{fate}": float(book.fates[fate]) for fate in FATES}
    causes = {f"reward/{cause}": float(count) for cause, count in sorted(book.causes.items())}
    monitored = {f"monitor/{what}": float(count) for what, count in sorted(book.monitored.items())}
    return fates | {"ledger/in_flight": float(len(book.live))} | causes | monitored


class Meter:
    """Adds up rounds between two rows of metrics.

    elapsed: seconds that the run took before it was resumed; goodput: where they went.
    """

    def __init__(self, elapsed: float = 0.0, goodput: Mapping[str, float] | None = None):
        self.start = time.monotonic() - elapsed
        self.goodput = Goodput(goodput)
        self.compilations = Compilations()
        self._clear()

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self.start

    def add(self, outcome: Outcome) -> None:
        self.rounds += 1
        self.tokens += sum(len(part.tokens) for part in outcome.sampled)
        self.usage.update({name: value for name, value in outcome.metrics.items() if name.startswith(SAMPLE)})

    def row(self) -> dict[str, float]:
        """The figures since the last row; what the sampler counted (`sample/...`) is added up over its rounds."""
        seconds = max(time.monotonic() - self.since, 1e-9)
        values = {
            "time/wall": self.elapsed,
            "time/round": seconds / max(1, self.rounds),
            "compile/count": float(self.compilations.count),
            **self.goodput.figures(),
            **self.usage,
        }
        if self.tokens:
            values["rollout/tokens_per_second"] = self.tokens / seconds
        if self.usage[WAITING]:
            values["rollout/idle_slot_share"] = self.usage[IDLE] / self.usage[WAITING]
        if self.usage[REUSED]:
            values["rollout/prefix_hit_rate"] = self.usage[REUSED] / (self.usage[REUSED] + self.usage[PREFILLED])
        self._clear()
        return values

    def close(self) -> None:
        self.compilations.close()

    def _clear(self) -> None:
        self.since = time.monotonic()
        self.rounds = self.tokens = 0
        self.usage: Counter[str] = Counter()


class Compilations:
    """Counts what XLA compiles in this process from now on: a figure that goes on rising tells of changing shapes."""

    EVENT = "/jax/core/compile/backend_compile_duration"

    def __init__(self) -> None:
        self.count = 0
        jax.monitoring.register_event_duration_secs_listener(self._hear)

    def close(self) -> None:
        jax.monitoring.unregister_event_duration_listener(self._hear)

    def _hear(self, event: str, duration: float, **_: object) -> None:
        self.count += event == self.EVENT
