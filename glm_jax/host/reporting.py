"""Where a run's figures go: the metrics file, and a line or a bar for the person."""

from __future__ import annotations

from collections.abc import Mapping

from glm_jax.report.metrics import MetricsWriter
from glm_jax.report.progress import Progress

# Shown while the run goes, under shorter names.
SHOWN = {
    "policy/loss": "loss",
    "rollout/reward": "reward",
    "critic/explained_variance": "explained",
    "staleness/max": "lag",
    "rollout/tokens_per_second": "tok/s",
}


class Report:
    """Writes each row to the metrics and says what matters."""

    def __init__(self, writer: MetricsWriter, progress: Progress):
        self.writer, self.progress = writer, progress

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self.writer.write(step, values)
        if "eval/count" in values:
            figures = [f"{name} {values[name]:.4g}" for name in ("eval/exact_match", "eval/reward") if name in values]
            self.progress.say(f"step {step}: " + "  ".join(figures))
        else:
            self.progress.update(step, {short: values[name] for name, short in SHOWN.items() if name in values})

    def flush(self) -> None:
        self.writer.flush()

    def say(self, text: str) -> None:
        self.progress.say(text)


class Silent:
    """The report of a process that is not the one to write it."""

    def write(self, step: int, values: Mapping[str, float]) -> None:
        pass

    def flush(self) -> None:
        pass

    def say(self, text: str) -> None:
        pass
