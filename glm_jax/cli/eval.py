"""`glm-jax eval`: pass@1 and pass@k of a policy on a config's held-out tasks, with 95 % intervals."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from absl import flags

from glm_jax.cli.flags import UsageError, parse

if TYPE_CHECKING:
    from glm_jax.host.measure import Measured


def run(argv: Sequence[str]) -> int:
    """Measures the workdir's newest checkpoint, or a model folder, and prints a table; --json writes it as JSON."""

    def define(values: flags.FlagValues) -> None:
        flags.DEFINE_string("model", None, "model folder to measure instead of the workdir", flag_values=values)
        flags.DEFINE_integer("samples", 1, "answers per question", lower_bound=1, flag_values=values)
        flags.DEFINE_string("json", None, "file for the results as JSON", flag_values=values)

    command = parse("eval", argv, define, required=("config",))
    model = command.flags.model
    if (command.workdir is None) == (model is None):
        raise UsageError("give one of --workdir (its newest checkpoint) and --model (a model folder)")
    # jax is imported here and not above, so that --help answers at once.
    from glm_jax.config.strict import read
    from glm_jax.host.config import RunConfig
    from glm_jax.host.measure import measure

    config = read(RunConfig, command.config)
    found = measure(config, command.workdir, Path(model) if model else None, command.flags.samples)
    print(table(found))
    if command.flags.json:
        Path(command.flags.json).write_text(json.dumps(as_json(found), indent=1) + "\n")
    return 0


def table(found: Measured) -> str:
    """The results as a person reads them."""
    lines = [f"{found.source}: {found.questions} held-out questions, {found.samples} sample(s) each", ""]
    lines.append(f"{'':<10} {'value':>7}   95 % interval")
    for k, estimate in found.passes.items():
        lines.append(f"{f'pass@{k}':<10} {estimate.value:7.4f}   {estimate.low:.4f} to {estimate.high:.4f}")
    for name in ("eval/reward", "eval/length", "eval/truncated_share", "eval/invalid"):
        if name in found.metrics:
            lines.append(f"{name.removeprefix('eval/'):<16} {found.metrics[name]:.4f}")
    return "\n".join(lines)


def as_json(found: Measured) -> dict:
    """The same, and every other figure, for a program."""
    passes = {f"pass@{k}": dataclasses.asdict(estimate) for k, estimate in found.passes.items()}
    return {
        "source": found.source,
        "questions": found.questions,
        "samples": found.samples,
        **passes,
        "metrics": dict(found.metrics),
    }
