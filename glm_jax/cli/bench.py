"""`glm-jax bench NAME`: measurements of this stack on this machine, beside others where they are installed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from absl import flags

from glm_jax.cli.flags import Command, UsageError, parse


@dataclass(frozen=True)
class Bench:
    """A bench: the flags that it defines and wants, and what makes its table from them."""

    about: str
    define: Callable[[flags.FlagValues], None]
    required: tuple[str, ...]
    call: Callable[[Command], str]


def run(argv: Sequence[str]) -> int:
    names = [arg for arg in argv if not arg.startswith("-")]
    name = next((arg for arg in names if arg in BENCHES), names[0] if names else None)
    if name is None and {"-h", "--help"} & set(argv):
        print(_help())
        return 0
    if (bench := BENCHES.get(name)) is None:
        known = "; ".join(f"{k}: {b.about}" for k, b in BENCHES.items())
        raise UsageError(f"{name!r} is no bench. Known: {known}" if name else f"which bench? Known: {known}")
    at = argv.index(name)
    command = parse(f"bench {name}", [*argv[:at], *argv[at + 1 :]], bench.define, required=bench.required)
    print(bench.call(command))
    return 0


def _define_repeats(values: flags.FlagValues) -> None:
    flags.DEFINE_integer("repeats", 5, "measured iterations of each", lower_bound=1, flag_values=values)
    flags.DEFINE_bool("smoke", False, "the smallest size: shows that it runs, measures nothing", flag_values=values)
    _define_json(values)


def _define_sandbox(values: flags.FlagValues) -> None:
    _define_repeats(values)
    values["repeats"].default = values["repeats"].value = 100  # milliseconds each


def _define_duel(values: flags.FlagValues) -> None:
    flags.DEFINE_string("peer_python", None, "a python that has the peer (default: this one)", flag_values=values)
    _define_repeats(values)


def _define_sparsity(values: flags.FlagValues) -> None:
    flags.DEFINE_string("picture", None, "file for the curves (PNG)", flag_values=values)
    _define_repeats(values)


def _define_checkpoint(values: flags.FlagValues) -> None:
    flags.DEFINE_integer("mib", 1024, "size of the state", lower_bound=1, flag_values=values)
    flags.DEFINE_string("folder", None, "on the disk that is measured (default: the current one)", flag_values=values)
    _define_repeats(values)


def _define_critic(values: flags.FlagValues) -> None:
    about = "rollouts of training tasks that the baseline is fitted on; never fewer than are held out"
    flags.DEFINE_integer("rollouts", 2048, about, lower_bound=1, flag_values=values)
    _define_json(values)


def _define_drafts(values: flags.FlagValues) -> None:
    flags.DEFINE_integer("seeds", 3, "of the weights that are trained", lower_bound=1, flag_values=values)
    _define_repeats(values)


def _define_handoff(values: flags.FlagValues) -> None:
    flags.DEFINE_integer("repeats", 20, "measured handoffs, where the devices are at hand", flag_values=values)
    _define_json(values)


def _define_json(values: flags.FlagValues) -> None:
    flags.DEFINE_string("json", None, "file for the figures", flag_values=values)


def _rl(command: Command) -> str:
    from glm_jax.bench import rl

    options = command.flags
    return rl.run(options.repeats, options.peer_python, _report(command), options.smoke)


def _model(command: Command) -> str:
    from glm_jax.bench import model

    options = command.flags
    return model.run(options.repeats, options.peer_python, _report(command), options.smoke)


def _rollout(command: Command) -> str:
    from glm_jax.bench import rollout

    options = command.flags
    return rollout.run(options.repeats, options.peer_python, _report(command), options.smoke)


def _critic(command: Command) -> str:
    # jax is imported here and not above, so that --help answers at once.
    from glm_jax.bench import critic
    from glm_jax.config.strict import read
    from glm_jax.host.config import RunConfig

    config = read(RunConfig, command.config)
    return critic.run(config, command.workdir, command.flags.rollouts, _report(command))


def _drafts(command: Command) -> str:
    from glm_jax.bench import drafts
    from glm_jax.config.strict import read
    from glm_jax.host.config import RunConfig

    config, options = read(RunConfig, command.config), command.flags
    return drafts.run(config, options.seeds, options.repeats, _report(command), options.smoke)


def _sparsity(command: Command) -> str:
    from glm_jax.bench import sparsity

    options = command.flags
    picture = Path(options.picture) if options.picture else None
    return sparsity.run(options.repeats, _report(command), picture, options.smoke)


def _router(command: Command) -> str:
    from glm_jax.bench import router

    options = command.flags
    return router.run(options.repeats, _report(command), options.smoke)


def _sandbox(command: Command) -> str:
    from glm_jax.bench import sandbox

    options = command.flags
    return sandbox.run(options.repeats, _report(command), options.smoke)


def _checkpoint(command: Command) -> str:
    from glm_jax.bench import checkpoint

    options = command.flags
    folder = Path(options.folder) if options.folder else None
    return checkpoint.run(options.repeats, options.mib, folder, _report(command), options.smoke)


def _handoff(command: Command) -> str:
    from glm_jax.bench import handoff
    from glm_jax.config.strict import read
    from glm_jax.host.config import RunConfig

    return handoff.run(read(RunConfig, command.config), command.flags.repeats, _report(command))


def _flops(command: Command) -> str:
    from glm_jax.bench import flops

    return flops.run(_report(command))


def _report(command: Command) -> Path | None:
    return Path(command.flags.json) if command.flags.json else None


def _help() -> str:
    lines = [f"  {name:<10} {bench.about}" for name, bench in BENCHES.items()]
    return "\n".join(
        ["usage: glm-jax bench NAME [flags]", "", *lines, "", "glm-jax bench NAME --help lists its flags."]
    )


BENCHES = {
    "checkpoint": Bench(
        "saving and restoring a state, beside a plain copy of the same bytes", _define_checkpoint, (), _checkpoint
    ),
    "drafts": Bench(
        "tokens that a pass with drafts samples after each way of training them, and their worth in time",
        _define_drafts,
        ("config",),
        _drafts,
    ),
    "flops": Bench(
        "operations and cache bytes per token of the 744B model, 4k to 1M context", _define_json, (), _flops
    ),
    "handoff": Bench(
        "bytes that a handoff moves over each mesh axis, and the share of the weights that stays",
        _define_handoff,
        ("config",),
        _handoff,
    ),
    "model": Bench("prefill and decode of a 17 M-parameter model, beside transformers", _define_duel, (), _model),
    "rollout": Bench(
        "the sampler as an engine: a crowd beside transformers, ragged lengths, prefixes, drafts, a long prompt",
        _define_duel,
        (),
        _rollout,
    ),
    "sparsity": Bench(
        "what a prompt's token costs from 4k to 32k context, attention and indexer apart",
        _define_sparsity,
        (),
        _sparsity,
    ),
    "router": Bench(
        "idle slots and waits of 8 to 512 simulated shards and of the real sampler, beside batch-wise submission",
        _define_repeats,
        (),
        _router,
    ),
    "sandbox": Bench("boxes: start, a command, 64 at once", _define_sandbox, (), _sandbox),
    "rl": Bench("one RL iteration: sample 64 completions, learn from them; beside TRL's GRPO", _define_duel, (), _rl),
    "critic": Bench(
        "variance of the return that a run's critic explains, beside position and prompt length alone",
        _define_critic,
        ("config", "workdir"),
        _critic,
    ),
}
