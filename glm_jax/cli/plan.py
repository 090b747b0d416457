"""`glm-jax plan`: compiles a config's round for a topology that is not there, and says whether it fits."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from absl import flags

from glm_jax.cli.flags import parse


def run(argv: Sequence[str]) -> int:
    """Prints the plan; 0 where the program fits, 3 where it does not."""

    def define(values: flags.FlagValues) -> None:
        flags.DEFINE_string("topology", None, "v5p:8x8x8, v6e:16x16, h100:16x8, ...", flag_values=values)
        which = "compile the whole round, or one that never learns, in less time"
        flags.DEFINE_enum("part", "round", ["round", "sample"], which, flag_values=values)
        flags.DEFINE_string("json", None, "also write the plan here", flag_values=values)
        flags.DEFINE_string("picture", None, "also draw the memory here, as PNG", flag_values=values)
        flags.DEFINE_string("program", None, "also write the compiled program here", flag_values=values)
        segment = "learn from segments of so many tokens (in place of learn.length), though rollouts may be longer"
        flags.DEFINE_integer("segment", None, segment, flag_values=values)
        flags.DEFINE_float("limit_minutes", 120, "give up after so long", flag_values=values)

    command = parse("plan", argv, define, required=("config", "topology"))
    from glm_jax.config.strict import read
    from glm_jax.host.config import RunConfig
    from glm_jax.plan import picture, report

    values, path = command.flags, lambda name: Path(name) if name else None
    config = read(RunConfig, command.config)
    if values.segment:
        config = replace(config, learn=replace(config.learn, length=values.segment))
    found = report.plan(config, values.topology, values.limit_minutes, values.part, path(values.program))
    print(report.table(found))
    if values.json:
        Path(values.json).write_text(json.dumps(found, indent=1) + "\n")
    if values.picture:
        picture.draw(found, Path(values.picture))
    return 0 if found["fits"] else 3
