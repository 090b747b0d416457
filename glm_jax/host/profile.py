"""A trace of a few rounds, for XProf."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax

WARM = 3  # rounds that pass before the trace starts: the first compiles, the next fill the slots


def profiled(program: Any, folder: Path, rounds: int) -> Any:
    """The program, tracing `rounds` of its rounds into `folder`."""
    count = 0

    def round(state: Any, inbox: Any) -> tuple[Any, Any]:
        nonlocal count
        if count == WARM:
            jax.block_until_ready(state)
            jax.profiler.start_trace(folder)
        made = program.round(state, inbox)
        if count == WARM + rounds - 1:
            jax.block_until_ready(made)
            jax.profiler.stop_trace()
        count += 1
        return made

    return dataclasses.replace(program, round=round)
