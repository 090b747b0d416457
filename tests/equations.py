"""A traced program's equations, for tests of what it is made of."""

from __future__ import annotations

from collections.abc import Iterator

import jax
from jax.extend import core


def equations(jaxpr: core.Jaxpr) -> Iterator[core.JaxprEqn]:
    """Every equation, those of inner programs too."""
    for equation in jaxpr.eqns:
        yield equation
        for value in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda v: hasattr(v, "eqns")):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from equations(inner)
