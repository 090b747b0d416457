"""The hardware that a program is traced for: the one at hand, unless it is to be compiled or counted for another."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh


class Target(NamedTuple):
    platform: str  # "tpu", "gpu", "cpu"
    mesh: Mesh | None = None  # that slots and heads are split over, by these axes
    rows: tuple[str, ...] = ()
    heads: tuple[str, ...] = ()
    # Where each device works on its own rows (sharding/manual.py):
    experts: str | None = None  # the axis that the experts are split over
    widths: tuple[str, ...] = ()  # and the axes that split each of them
    gather: Callable[[Any, Any], Any] | None = None  # makes a parameter whole, given its declaration
    context: str | None = None  # the axis that the columns of rows are split over
    stages: Any = None  # model/stages.py: the axis that shares out the layers of a group


_target: ContextVar[Target | None] = ContextVar("target", default=None)


def target() -> Target:
    return _target.get() or Target(jax.default_backend())


def on_cpu() -> bool:
    """Whether to trace the formulations that a CPU runs fastest."""
    return target().platform == "cpu"


@contextmanager
def tracing_for(platform: str, **how) -> Iterator[None]:
    """Traces as on `platform`; `how` are fields of Target. What jit has traced before and kept is not traced again."""
    token = _target.set(Target(platform, **how))
    try:
        yield
    finally:
        _target.reset(token)
