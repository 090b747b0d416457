"""A run's figures: one JSON object per line in WORKDIR/metrics.jsonl, and the same as TensorBoard events."""

from __future__ import annotations

import json
import math
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter

FILE, EVENTS = "metrics.jsonl", "tensorboard"
NOT_FINITE = "not_finite"  # names of the figures of a line that were NaN or infinite


class MetricsError(ValueError):
    """A metrics file that cannot be read, or a figure that is none."""


class MetricsWriter:
    """Appends figures by step. With `resume_step` the lines up to that step are kept and later ones are cut.

    Without it the run starts anew: an earlier run's figures in the same workdir are removed.
    """

    def __init__(self, workdir: str | Path, resume_step: int | None = None) -> None:
        workdir = Path(workdir)
        events = workdir / EVENTS
        events.mkdir(parents=True, exist_ok=True)
        kept = [] if resume_step is None else [line for line in _lines(workdir) if line["step"] <= resume_step]
        if resume_step is None:
            for old in events.glob("events.out.tfevents.*"):
                old.unlink()
        fresh = workdir / f"{FILE}.new"
        fresh.write_text("".join(json.dumps(line) + "\n" for line in kept))
        os.replace(fresh, workdir / FILE)
        self._lines = (workdir / FILE).open("a", encoding="utf-8")
        name = f"events.out.tfevents.{time.time_ns() // 10**9:010d}.{socket.gethostname()}.{time.time_ns() % 10**9}"
        self._events = (events / name).open("wb")
        self._records = RecordWriter(self._events)
        self._event(file_version="brain.Event:2")
        if resume_step is not None:
            # TensorBoard drops what earlier files hold from this step on.
            self._event(step=resume_step + 1, session_log=SessionLog(status=SessionLog.START))

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def write(self, step: int, values: Mapping[str, float]) -> tuple[str, ...]:
        """Writes a line. A NaN or infinite figure is left out and named under `not_finite`; returns those names.

        Raises MetricsError for a value that is no number.
        """
        finite, other = {}, []
        for name, value in values.items():
            try:
                number = float(value)
            except (TypeError, ValueError) as error:
                raise MetricsError(
                    f"metric {name!r} is {value!r} ({type(value).__name__}); it has to be one number"
                ) from (error)
            if math.isfinite(number):
                finite[name] = number
            else:
                other.append(name)
        line = {"step": int(step), **finite, **({NOT_FINITE: other} if other else {})}
        self._lines.write(json.dumps(line) + "\n")
        self._lines.flush()
        summaries = [Summary.Value(tag=name, simple_value=number) for name, number in finite.items()]
        self._event(step=int(step), summary=Summary(value=summaries))
        return tuple(other)

    def flush(self) -> None:
        """Forces everything written so far to the disk, so that a checkpoint never lies ahead of its figures."""
        for file in (self._lines, self._events):
            file.flush()
            os.fsync(file.fileno())

    def close(self) -> None:
        """Flushes and closes both files; may be called twice."""
        if not self._lines.closed:
            self.flush()
            self._lines.close()
            self._events.close()

    def _event(self, **fields: Any) -> None:
        self._records.write(Event(wall_time=time.time(), **fields).SerializeToString())
        self._events.flush()


def read_metrics(workdir: str | Path) -> list[dict[str, Any]]:
    """The lines of WORKDIR/metrics.jsonl in order, without one that a kill left half written at the end.

    Raises MetricsError when there is no such file, or when a line in its midst is damaged.
    """
    path = Path(workdir) / FILE
    if not path.exists():
        raise MetricsError(f"{path} does not exist; give the workdir of a run")
    return _lines(Path(workdir))


def _lines(workdir: Path) -> list[dict[str, Any]]:
    path = workdir / FILE
    if not path.exists():
        return []
    texts = path.read_text(encoding="utf-8").split("\n")
    whole = texts[:-1]  # the last one is empty, or was being written when the run was killed
    found = []
    for number, text in enumerate(whole, start=1):
        try:
            line = json.loads(text)
            line["step"] = int(line["step"])
        except (ValueError, TypeError, KeyError) as error:
            raise MetricsError(
                f"{path}:{number} is no line of metrics: {text[:80]!r}; remove the line to go on without it"
            ) from error
        found.append(line)
    return found
