"""A run in one picture: its curves, and a few rollouts in text."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Title, and the metrics drawn in the panel.
PANELS = (
    ("reward, of training and held out", ("rollout/reward", "eval/reward", "eval/exact_match")),
    ("explained variance of the critic", ("critic/explained_variance",)),
    ("sampler against trainer, |Δ log-prob|", ("rollout/logprob_gap_mean", "rollout/logprob_gap_max")),
)
SHOWN = 3  # rollouts in text
WIDTH, LINES = 44, 7  # of a rollout's text


@dataclass(frozen=True)
class Sample:
    """A rollout to show: what was asked, what the policy said, what is right, and the reward (None = invalid)."""

    question: str
    completion: str
    answer: str | None
    reward: float | None


def run_picture(metrics: Sequence[Mapping[str, Any]], samples: Sequence[Sample], path: str | Path) -> None:
    """Writes a PNG of a run's metrics over its steps, with up to three samples below.

    `metrics` is what read_metrics gives; a metric that was never logged is left out.
    """
    figure = blank((13, 5.6))
    grid = figure.subplots(2, len(PANELS), gridspec_kw={"height_ratios": (3, 1)})
    for axes, (title, names) in zip(grid[0], PANELS, strict=True):
        _panel(axes, title, [(name, curve(metrics, name)) for name in names])
    for place, axes in enumerate(grid[1]):
        axes.axis("off")
        if place < min(SHOWN, len(samples)):
            text = describe(samples[place])
            axes.text(0, 1, text, va="top", family="monospace", fontsize=9, transform=axes.transAxes, parse_math=False)
    figure.savefig(path, dpi=110)


def blank(inches: tuple[float, float]) -> Any:
    """An empty matplotlib figure. pyplot would look for a display; a bare figure does not."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=inches, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def curve(metrics: Sequence[Mapping[str, Any]], name: str) -> tuple[list[int], list[float]]:
    """Steps and values of one metric, where it was logged."""
    points = [(line["step"], line[name]) for line in metrics if name in line]
    return [step for step, _ in points], [value for _, value in points]


def describe(sample: Sample) -> str:
    """A sample as a few short lines, with what cannot be printed shown as escapes."""
    reward = "invalid" if sample.reward is None else f"{sample.reward:.2f}"
    lines = [f"reward {reward}"]
    fields = (("asked", sample.question), ("said", sample.completion), ("right", sample.answer))
    for name, text in fields:
        if text is not None:
            lines += textwrap.wrap(f"{name:>5}: {printable(text)}", WIDTH, subsequent_indent=" " * 7) or [f"{name}:"]
    return "\n".join(lines if len(lines) <= LINES else [*lines[: LINES - 1], "       ..."])


def printable(text: str) -> str:
    """`text` with every character that no font shows, or that moves a terminal's cursor, as an escape."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _panel(axes: Any, title: str, curves: Sequence[tuple[str, tuple[list[int], list[float]]]]) -> None:
    axes.set_title(title, fontsize=10)
    axes.set_xlabel("round")
    axes.grid(alpha=0.3)
    for name, (steps, values) in curves:
        if steps:
            # Few points, as of evaluations, are lost without a mark.
            axes.plot(steps, values, label=name, linewidth=1.2, marker="o" if len(steps) <= 30 else None, markersize=3)
    if axes.lines:
        axes.legend(fontsize=8)
    if any("gap" in name for name, _ in curves) and any(min(v, default=0) > 0 for _, (_, v) in curves):
        axes.set_yscale("log")
