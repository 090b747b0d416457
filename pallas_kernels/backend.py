"""Which implementation of an operation runs: the platform's own, with XLA's where that one cannot serve."""

from __future__ import annotations

from collections.abc import Callable

import jax

PREFERRED = {"tpu": ("tpu", "xla"), "gpu": ("gpu", "xla")}  # by platform; everywhere else XLA alone


def choose(operation: str, implementations: dict[str, Callable], backend: str | None) -> Callable:
    """The implementation called `backend`, or one that tries the platform's implementations in order.

    An implementation that cannot serve a shape raises NotImplementedError; the next one is tried unless it was asked
    for by name.
    """
    if backend is not None:
        if backend not in implementations:
            known = ", ".join(sorted(implementations))
            raise NotImplementedError(f"{operation} has no backend {backend!r}; it has {known}")
        return implementations[backend]
    names = [name for name in PREFERRED.get(jax.default_backend(), ("xla",)) if name in implementations]

    def first_that_serves(*args, **kwargs):
        for name in names[:-1]:
            try:
                return implementations[name](*args, **kwargs)
            except NotImplementedError:
                continue
        return implementations[names[-1]](*args, **kwargs)

    return first_that_serves
