"""Joining several processes: real ones on loopback, and variables that do not fit together."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest

from glm_jax.host import cluster
from glm_jax.host.errors import RunError

PROGRAM = """
from glm_jax.host import cluster
cluster.join()
import jax
from jax.experimental.multihost_utils import process_allgather
print(jax.process_count(), jax.device_count(), process_allgather(jax.process_index()).tolist())
"""


def test_two_processes_join_by_the_three_variables_alone():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    base = {**os.environ, "XLA_FLAGS": "", cluster.COORDINATOR: f"127.0.0.1:{port}", cluster.COUNT: "2"}
    # A scheduler's variables that would say otherwise.
    base |= {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "9", "SLURM_PROCID": "5", "SLURM_STEP_NODELIST": "nowhere"}
    starts = [{**base, cluster.NUMBER: str(n)} for n in range(2)]
    pipe = subprocess.PIPE
    made = [
        subprocess.Popen([sys.executable, "-c", PROGRAM], env=e, stdout=pipe, stderr=pipe, text=True) for e in starts
    ]
    for process in made:
        out, error = process.communicate(timeout=120)
        assert process.returncode == 0, error
        assert out.splitlines()[-1] == "2 2 [0, 1]"


def test_alone_nothing_is_joined(monkeypatch):
    monkeypatch.setattr("jax.distributed.initialize", lambda *a, **k: pytest.fail("joined"))
    cluster.join({})
    cluster.join({cluster.COORDINATOR: "host:1", cluster.COUNT: "1", cluster.NUMBER: "0"})


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
        cluster.join({cluster.COORDINATOR: address, cluster.COUNT: count, cluster.NUMBER: number})
