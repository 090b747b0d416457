"""Compiles a config's round for a topology and prints what the compiler says as JSON: a process of its own.

python -m glm_jax.plan.compile TOPOLOGY round|sample [FILE] < a pickled RunConfig
"""

from __future__ import annotations

import json
import logging
import pickle
import re
import resource
import sys
import time
from pathlib import Path

from glm_jax.host.config import RunConfig
from glm_jax.plan import machine

LOG = logging.getLogger("glm-jax plan")


def compiled(config: RunConfig, on: machine.Machine, which: str, text: Path | None) -> dict:
    """Memory, costs, the largest values, seconds. Where the program does not fit, what it would have taken instead.

    `which` of a run's programs: `round`, or `sample`, a round that never learns.
    """
    import jax

    from glm_jax.plan import cost, hlo, program

    devices = machine.devices(on)
    built = program.program_of(config, devices)
    state, inbox = program.arguments(built, config)
    found = {"devices": built.mesh.size, "state": program.state_bytes(state)}
    kept = lambda remat: program.activation_bytes(built, config, remat) if which == "round" else 0
    LOG.info("tracing what the backward pass keeps")
    found["activations"], found["activations_with_remat"] = kept(False), kept(True)
    LOG.info("lowering for %s", on)
    start = time.monotonic()
    lowered = getattr(built, which).lower(state, inbox)
    found["lower_seconds"] = time.monotonic() - start
    LOG.info("lowered in %.0f s; compiling", found["lower_seconds"])
    start = time.monotonic()
    try:
        done = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        found["needed"] = exceeded(str(error))
        if not found["needed"]:
            raise
        LOG.info("it does not fit: %s", str(error)[:4000])
        done = None
    found["compile_seconds"] = time.monotonic() - start
    LOG.info("the compiler took %.0f s", found["compile_seconds"])
    if done is not None:
        memory, whole = done.memory_analysis(), done.as_text()
        if text:
            text.write_text(whole)
        names = ("argument", "output", "alias", "temp", "generated_code")
        found["memory"] = {name: getattr(memory, f"{name}_size_in_bytes") for name in names}
        read = hlo.parse(whole)
        phases = cost.of_program(read, dict(built.mesh.shape), config.learn.micro_batches)
        found["phases"] = {name: cost.plain(phase) for name, phase in phases.items()}
        found["largest"] = cost.largest(read)
    found["host_gib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return found


def exceeded(message: str) -> dict[str, float] | None:
    """Bytes that a program would take, from the compiler's refusal: of all, or of temporaries.

    None where it refused for another reason.
    """
    units = dict(zip("KMGT", (2**10, 2**20, 2**30, 2**40), strict=True))
    forms = {"all": r"Used ([\d.]+)([KMGT]) of [\d.]+[KMGT] hbm", "temp": r"\(([\d.]+)([KMGT])\) exceeds available HBM"}
    for what, form in forms.items():
        if found := re.search(form, message):
            return {what: float(found[1]) * units[found[2]]}
    return None


def main(topology: str, which: str, text: str | None = None) -> None:
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    LOG.setLevel(logging.INFO)
    config = pickle.load(sys.stdin.buffer)
    print(json.dumps(compiled(config, machine.read(topology), which, Path(text) if text else None)))


if __name__ == "__main__":
    main(*sys.argv[1:])
