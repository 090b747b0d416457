"""The hardware that a program is traced for: the one at hand, unless it is to be compiled or counted for another."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import jax

_target: ContextVar[str | None] = ContextVar("target", default=None)


def on_cpu() -> bool:
    """Whether to trace the formulations that a CPU runs fastest."""
    return (_target.get() or jax.default_backend()) == "cpu"


@contextmanager
def tracing_for(platform: str) -> Iterator[None]:
    """Traces as on `platform` ("tpu", "gpu", "cpu"). What jit has traced before and kept is not traced again."""
    token = _target.set(platform)
    try:
        yield
    finally:
        _target.reset(token)
