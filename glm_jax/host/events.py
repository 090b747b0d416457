"""An append-only file of JSON lines with a committed length: the form in which a run's ledger survives a kill."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from glm_jax.host.errors import LedgerError


class EventFile:
    """Appends events, one JSON object per line. `offset` is the length in bytes, buffered events included.

    Opening cuts the file to `offset` bytes (0 starts it anew), so that what was written after the last checkpoint is
    undone together with everything else that happened after it. With `kept` False another process writes the file, and
    this one only counts along.
    """

    def __init__(self, path: Path, offset: int = 0, kept: bool = True):
        path.parent.mkdir(parents=True, exist_ok=True)
        present = path.stat().st_size if path.exists() else 0
        if offset > present:
            raise LedgerError(
                f"{path} holds {present} bytes, but the checkpoint was taken at {offset}: the file was cut or "
                "replaced. Restore it, or start in an empty --workdir."
            )
        self.path, self.kept = path, kept
        self._file = open(path if kept else os.devnull, "ab")
        if kept:
            self._file.truncate(offset)
        self.offset = offset

    def append(self, event: dict[str, Any]) -> None:
        line = json.dumps(event, separators=(",", ":")).encode() + b"\n"
        self._file.write(line)
        self.offset += len(line)

    def flush(self) -> None:
        """Hands the events to the operating system: they survive the end of this process, not that of the machine."""
        self._file.flush()

    def sync(self) -> int:
        """Forces the events onto the disk; returns the offset that a checkpoint may name from now on."""
        self._file.flush()
        if self.kept:
            os.fsync(self._file.fileno())
        return self.offset

    def close(self) -> None:
        self._file.close()


def read_events(path: Path, offset: int | None = None) -> Iterator[dict[str, Any]]:
    """The events of a file in order, up to `offset` bytes (None: all that are whole).

    A torn last line is what a kill leaves behind, and is passed over where it lies beyond the committed offset.
    Raises LedgerError for a line within it that is torn or is not JSON.
    """
    read = 0
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if offset is not None and read >= offset:
                return
            read += len(line)
            whole = line.endswith(b"\n") and (offset is None or read <= offset)
            try:
                event = json.loads(line) if whole else None
            except ValueError:
                event = None
            if isinstance(event, dict):
                yield event
            elif offset is None and not line.endswith(b"\n"):
                return
            else:
                raise LedgerError(f"{path}, line {number}, is damaged within the committed bytes: {line[:80]!r}")
    if offset is not None and read < offset:
        raise LedgerError(f"{path} ends after {read} bytes, before the committed {offset}: the file was cut.")
