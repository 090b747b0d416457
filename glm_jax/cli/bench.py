"""`glm-jax bench NAME`: measurements of this stack on this machine, beside others where they are installed."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path

from absl import flags

from glm_jax.cli.flags import UsageError, parse

BENCHES = {"rl": "one RL iteration: sample 64 completions, learn from them; beside TRL's GRPO"}


def _define(values: flags.FlagValues) -> None:
    flags.DEFINE_integer("repeats", 5, "measured iterations of each", lower_bound=1, flag_values=values)
    flags.DEFINE_string("peer_python", None, "a python that has trl installed (default: this one)", flag_values=values)
    flags.DEFINE_string("json", None, "file for the figures", flag_values=values)
    flags.DEFINE_bool("smoke", False, "the smallest size: shows that it runs, measures nothing", flag_values=values)


def run(argv: Sequence[str]) -> int:
    command = parse("bench", argv, _define, positional=("name",), required=())
    (name,) = command.positional
    if name not in BENCHES:
        known = "; ".join(f"{k}: {v}" for k, v in BENCHES.items())
        raise UsageError(f"{name!r} is no bench. Known: {known}")
    bench = importlib.import_module(f"glm_jax.bench.{name}")
    options = command.flags
    report = Path(options.json) if options.json else None
    print(bench.run(options.repeats, options.peer_python, report, options.smoke))
    return 0
