"""What a kernel is judged at: a shape of GLM-5.2's, XLA's formulation of the same work, and how often its loops run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from pallas_kernels.compile.schedule import Loop, runs

Arguments = list[tuple[tuple[int, ...], Any]]  # shape and dtype of each

Times = Callable[[list[Loop]], list[int]]


def whole(floor: float, spent: list[int]) -> dict[str, float]:
    """The matrix units' floor over all cycles."""
    return {"matrix_share": floor / max(sum(spent), floor)}


class Case(NamedTuple):
    kernel: str  # also its name in the schedule
    shape: str  # for people
    multiply_adds: int  # that are useful
    hbm_bytes: int  # that have to move
    build: Callable[[str], tuple[Callable, Callable, Arguments]]  # for a backend: kernel, XLA's, arguments
    times: Times | dict[str, Times] = runs  # how often each loop of the kernel runs, or of several by their names
    shares: Callable[[float, list[int]], dict[str, float]] = whole  # of the matrix floor and the cycles of each loop
    temporary: dict[str, int] = {}  # bytes of memory it may take for itself, by backend; otherwise half of hbm_bytes
    float8: bool = False  # which a GPU has to convert

    def limit(self, backend: str) -> float:
        return self.temporary.get(backend, self.hbm_bytes / 2)
