"""Several processes under jax.distributed on loopback."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

from glm_jax.host.cluster import COORDINATOR, COUNT, NUMBER


def run_together(program: str, count: int, devices: int, *args: str, **environment: str) -> list[str]:
    """The last line that each of `count` processes of a Python program prints; each has so many CPU devices.

    Gloo's own lines do not count: it writes them when it likes.
    """
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    flags = f"--xla_force_host_platform_device_count={devices}"
    base = {**os.environ, "XLA_FLAGS": flags, COORDINATOR: f"127.0.0.1:{port}", COUNT: str(count), **environment}
    pipe, command = (
        subprocess.PIPE,
        [sys.executable, "-c", f"from glm_jax.host.cluster import join; join(60.0)\n{program}"],
    )
    starts = [{**base, NUMBER: str(number)} for number in range(count)]
    made = [subprocess.Popen([*command, *args], env=env, stdout=pipe, stderr=pipe, text=True) for env in starts]
    try:
        found = []
        for process in made:
            out, error = process.communicate(timeout=300)
            assert process.returncode == 0, error
            found.append([line for line in out.splitlines() if not line.startswith("[Gloo]")][-1])
        return found
    finally:
        for process in made:
            process.kill()
