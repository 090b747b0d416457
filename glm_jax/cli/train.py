"""`glm-jax train`: the stages of a config, from the start or from where the workdir's last checkpoint left them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from absl import flags

from glm_jax.cli.flags import parse
from glm_jax.cli.main import report


def run(argv: Sequence[str]) -> int:
    """Trains; with --dry_run prints the config as it was read and what it will take of memory, and stops there."""

    def define(values: flags.FlagValues) -> None:
        flags.DEFINE_bool("dry_run", False, "print the resolved config and the memory estimate", flag_values=values)

    command = parse("train", argv, define, required=("config",) if _dry(argv) else ("config", "workdir"))
    # jax is imported here and not above, so that --help answers at once.
    from glm_jax.config.strict import read, render
    from glm_jax.host.config import RunConfig

    config = read(RunConfig, command.config)
    if command.flags.dry_run:
        print(render(config))
        print(_memory(config))
        return 0
    from glm_jax.host import cluster
    from glm_jax.host.run import train
    from glm_jax.host.watch import watched

    peers = cluster.join(config.patience)
    with watched(peers, partial(report, "train")):
        train(config, command.workdir, peers)
    return 0


def _dry(argv: Sequence[str]) -> bool:
    return bool({"--dry_run", "-dry_run", "--dry_run=true"} & set(argv))


def _memory(config: object) -> str:
    """What the program takes of each device, as far as shapes tell it."""
    import jax

    from glm_jax.data.tokenizer import tokenizer_of
    from glm_jax.host import compose
    from glm_jax.plan import program

    built = compose.make_program(config, compose.model_config(config, tokenizer_of(config.model.path)))
    state, _ = program.arguments(built, config)
    parts = {**program.state_bytes(state), "activations": program.activation_bytes(built, config)}
    rows = [f"  {name:<12} {size / 2**20:12.1f} MiB" for name, size in (*parts.items(), ("all", sum(parts.values())))]
    where = (
        f"on each of {built.mesh.size} devices" if built.mesh.size > 1 else f"on one device ({jax.default_backend()})"
    )
    return "\n".join([f"memory {where}, the compiler's temporaries apart (glm-jax plan tells them):", *rows])
