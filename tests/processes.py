"""Several processes under jax.distributed on loopback."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from glm_jax.host.cluster import COORDINATOR, COUNT, NUMBER

ROOT = Path(__file__).resolve().parent.parent


def flags(devices: int) -> str:
    """The XLA flags of the tests, for a process of so many CPU devices."""
    return re.sub("(device_count)=8", rf"\1={devices}", os.environ["XLA_FLAGS"])


@contextmanager
def started(command: Sequence[str], count: int, devices: int, **environment: str) -> Iterator[list[subprocess.Popen]]:
    """`count` processes of a command that are to join, each with so many CPU devices. None is left at the end."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    base = {
        **os.environ,
        "XLA_FLAGS": flags(devices),
        COORDINATOR: f"127.0.0.1:{port}",
        COUNT: str(count),
        **environment,
    }
    pipe, made = subprocess.PIPE, []
    try:
        for number in range(count):
            env = {**base, NUMBER: str(number)}
            made.append(subprocess.Popen(command, cwd=ROOT, env=env, stdout=pipe, stderr=pipe, text=True))
        yield made
    finally:
        for process in made:
            process.kill()
            process.communicate()


def run_together(program: str, count: int, devices: int, *args: str, **environment: str) -> list[str]:
    """The last line that each process of a Python program prints, in which `peers` are joined.

    Gloo's own lines do not count: it writes them when it likes.
    """
    joined = f"from glm_jax.host.cluster import join; peers = join(60.0)\n{program}"
    with started([sys.executable, "-c", joined, *args], count, devices, **environment) as processes:
        found = []
        for process in processes:
            out, error = process.communicate(timeout=300)
            assert process.returncode == 0, error
            found.append([line for line in out.splitlines() if not line.startswith("[Gloo]")][-1])
        return found
