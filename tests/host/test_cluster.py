"""Joining several processes: real ones on loopback, and variables that do not fit together."""

from __future__ import annotations

import pytest

from glm_jax.host import cluster
from glm_jax.host.errors import RunError
from tests.processes import run_together

PROGRAM = """
import jax
for turn in range(10):
    numbers = peers.exchange(jax.process_index())
few = len(peers.client.key_value_dir_get("exchange/")) <= 3
print(jax.process_count(), jax.device_count(), numbers, few, jax.config.values["jax_cuda_visible_devices"])
"""


def test_two_processes_join_by_the_three_variables_alone():
    # A scheduler's variables say otherwise: nine processes, of which each takes the GPU of its number on the host.
    slurm = dict(JOB_ID="1", NTASKS="9", PROCID="5", LOCALID="5", STEP_NODELIST="nowhere", STEP_NUM_NODES="1")
    slurm = {f"SLURM_{name}": value for name, value in slurm.items()}
    assert run_together(PROGRAM, 2, 3, **slurm) == ["2 6 [0, 1] True all"] * 2


def test_alone_nothing_is_joined(monkeypatch):
    monkeypatch.setattr("jax.distributed.initialize", lambda *a, **k: pytest.fail("joined"))
    alone = {cluster.COORDINATOR: "host:1", cluster.COUNT: "1", cluster.NUMBER: "0"}
    assert cluster.join(60.0, {}).count == cluster.join(60.0, alone).count == 1


@pytest.mark.parametrize(
    ("address", "count", "number", "told"),
    [
        ("host:1", "", "", "set without JAX_NUM_PROCESSES and JAX_PROCESS_ID"),
        ("host:1", "two", "0", "JAX_NUM_PROCESSES=two: it has to be a whole number"),
        ("host:1", "2", "2", "JAX_PROCESS_ID=2 and JAX_NUM_PROCESSES=2"),
        ("host", "2", "0", "write HOST:PORT"),
    ],
)
def test_variables_that_do_not_fit_are_named(address, count, number, told):
    with pytest.raises(RunError, match=told):
        cluster.join(60.0, {cluster.COORDINATOR: address, cluster.COUNT: count, cluster.NUMBER: number})
