"""Several processes as one run: jax.distributed, where the launcher says so."""

from __future__ import annotations

import os
from collections.abc import Mapping

import jax
import orbax.checkpoint as ocp

from glm_jax.host.errors import RunError
from glm_jax.host.peers import ALONE, Peers

COORDINATOR, COUNT, NUMBER = "JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"
START_LIMIT = 600  # seconds that the last process may come after the first
SILENT_LIMIT = 60  # seconds without a heartbeat after which jax aborts all processes; host/watch.py speaks earlier


def join(patience: float, environment: Mapping[str, str] = os.environ) -> Peers:
    """Joins the processes that the environment tells of; alone where it tells of none.

    patience: seconds that one of them waits for the others in the midst of a run.

    The three variables say where process 0 listens (host:port), how many processes there are, and which of them this
    one is. Nothing else is asked: neither a scheduler's variables nor a metadata server. Before jax is first used.
    Raises RunError for variables that do not fit together.
    """
    given = {name: environment[name] for name in (COORDINATOR, COUNT, NUMBER) if environment.get(name)}
    if not given:
        return ALONE
    if missing := [name for name in (COORDINATOR, COUNT, NUMBER) if name not in given]:
        raise RunError(f"{' and '.join(given)} set without {' and '.join(missing)}: a launcher sets all three or none.")
    address, count, number = given[COORDINATOR], _integer(given, COUNT), _integer(given, NUMBER)
    if not 0 <= number < count:
        raise RunError(f"{NUMBER}={number} and {COUNT}={count}: processes are numbered from 0 to {COUNT} - 1.")
    if not address.rpartition(":")[2].isdigit():
        raise RunError(f"{COORDINATOR}={address}: write HOST:PORT.")
    if count == 1:
        return ALONE
    jax.distributed.initialize(
        address,
        count,
        number,
        cluster_detection_method="deactivate",  # under SLURM jax would give each process a single GPU of its host
        initialization_timeout=START_LIMIT,
        heartbeat_timeout_seconds=SILENT_LIMIT,
    )
    return Peers(number, count, ocp.multihost.get_jax_distributed_client(), patience)


def _integer(given: Mapping[str, str], name: str) -> int:
    try:
        return int(given[name])
    except ValueError:
        raise RunError(f"{name}={given[name]}: it has to be a whole number.") from None
