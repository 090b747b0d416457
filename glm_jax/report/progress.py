"""What a run says while it goes: a live bar on a terminal, plain lines anywhere else."""

from __future__ import annotations

import time
from collections.abc import Mapping

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bar


class Progress:
    """Shows how far a run is. `total` counts the same steps as `update` does; `label` names what they belong to.

    Away from a terminal a line is printed for the first and last step, and otherwise once in `every` seconds at most.
    """

    def __init__(self, total: int, label: str, every: float = 5.0, console: Console | None = None) -> None:
        self._total, self._label, self._every = total, label, every
        self._console = console or Console()
        self._start = time.monotonic()
        self._said: float | None = None
        self._bar: Bar | None = None
        if self._console.is_terminal:
            columns = (TextColumn("{task.description}"), BarColumn(bar_width=24), MofNCompleteColumn())
            times = (TimeElapsedColumn(), TimeRemainingColumn(), TextColumn("{task.fields[figures]}", markup=False))
            self._bar = Bar(*columns, *times, console=self._console, refresh_per_second=4)
            self._task = self._bar.add_task(label, total=total, figures="")

    def __enter__(self) -> Progress:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar:
            self._bar.stop()

    def update(self, step: int, figures: Mapping[str, float]) -> None:
        """Shows that `step` steps of the total are done, and the latest figures by name."""
        text = "  ".join(f"{name} {value:.4g}" for name, value in figures.items())
        if self._bar:
            self._bar.update(self._task, completed=step, figures=text)
            return
        now = time.monotonic()
        if self._said is None or step >= self._total or now - self._said >= self._every:
            self._said = now
            self.say(f"{self._label} {step}/{self._total}  {now - self._start:.0f} s  {text}".rstrip())

    def say(self, text: str) -> None:
        """Prints a line of its own, above the bar where there is one."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)
