"""Whether boxes isolate on this machine: each property is tried, none is inferred from what is installed."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from glm_jax.envs.sandbox.box import Box
from glm_jax.envs.sandbox.errors import SandboxUnavailable
from glm_jax.envs.sandbox.limits import Limits

_LIMITS = Limits(memory_mb=96, disk_mb=8, processes=24)
_LIMIT = 20.0  # seconds that a single check may take; all together take well under one
_TRESPASS = Path(__file__).with_name("trespass.py").read_text()


@dataclass(frozen=True)
class Property:
    """Something that has to hold, whether it does, and what its failure looks like."""

    name: str
    holds: bool
    failure: str


@dataclass(frozen=True)
class Report:
    """What this machine's boxes are: every property holds, or `require` would have raised."""

    properties: tuple[Property, ...]
    memory_by: str  # cgroup | watchdog
    root: bool
    seconds: float

    @property
    def weaker(self) -> tuple[str, ...]:
        """What holds less than it could, in words."""
        notes = []
        if self.memory_by == "watchdog":
            notes.append(
                "memory is looked at ten times a second, files do not count (no writable cgroup: run as root for one)"
            )
        if not self.root:
            notes.append("all boxes share this user's id outside; namespaces keep them apart (run as root for ids)")
        return (*notes, "CPU time is bounded by each command's time limit alone")


@cache
def require() -> Report:
    """The report of this machine, made once per process. Raises SandboxUnavailable where a property fails."""
    report = probe()
    if failed := [f"{p.name}: {p.failure}" for p in report.properties if not p.holds]:
        raise SandboxUnavailable(
            "boxes of bubblewrap do not isolate here: "
            + "; ".join(failed)
            + "; nothing is run without isolation: use a machine or container whose kernel holds these"
        )
    return report


def probe() -> Report:
    """Tries every property in boxes of their own."""
    start = time.monotonic()
    properties: list[Property] = []

    def check(name: str, holds: bool, failure: object) -> None:
        properties.append(Property(name, holds, str(failure)))

    with _Host() as host, Box(_LIMITS) as box:
        argv = [sys.executable, "-I", "-S", "-c", _TRESPASS, str(host.port), host.abstract, host.sentinel, *host.hidden]
        result = box.run(argv, _LIMIT)
        try:
            seen = json.loads(str(result.out))
        except ValueError as error:
            raise SandboxUnavailable(f"the probe failed in its box, code {result.code}: {result.err}") from error
        check("not root", seen["uid"] != 0, f"uid {seen['uid']}")
        check("no capabilities", not seen["capabilities"] and seen["no_new_privs"], seen["capabilities"])
        check("network cut", not seen["reached"], f"reached {seen['reached']}")
        check("system read-only", not seen["wrote"], f"wrote to {seen['wrote']}")
        check("host files hidden", not seen["hidden"], f"saw {seen['hidden']}")
        check("host processes hidden", not seen["host_process"] and len(seen["processes"]) <= 3, seen["processes"])
        check("supervisor out of reach", not seen["supervisor"], "its open files can be listed")
        check("system calls filtered", not (seen["traced"] or seen["namespace"]), "ptrace or unshare is allowed")
        check("disk capped", not seen["disk"], f"9 MiB written, limit {_LIMITS.disk_mb}")
        check("processes capped", seen["forks"] <= _LIMITS.processes, f"{seen['forks']} forks, {_LIMITS.processes}")
        hog = [sys.executable, "-I", "-S", "-c", "import time; x = b'x' * (400 << 20); time.sleep(2)"]
        memory = box.run(hog, _LIMIT)
        check("memory capped", memory.code != 0, f"400 MiB taken, limit {_LIMITS.memory_mb}")
        slow = box.run("setsid sleep 1000 & sleep 1000", 0.05)
        alive = box.run(["/bin/sh", "-c", "echo /proc/[0-9]*/exe"], _LIMIT)
        left = [name for name in str(alive.out).split() if name != "/proc/1/exe"]
        check("time limited", slow.timed_out and len(left) <= 1, f"{left} after the limit")
        box.run("sleep 1000 >/dev/null 2>&1 &", _LIMIT)
        pid, memory_by = box.pid, box.memory_by
    check("nothing left", _gone(pid), f"process {pid} outlives its box")
    return Report(tuple(properties), memory_by, os.geteuid() == 0, time.monotonic() - start)


class _Host:
    """Things of the host that a box must not reach: a listener, an abstract socket, files, a process."""

    def __enter__(self) -> _Host:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.abstract = f"glm-jax-probe-{os.getpid()}-{time.monotonic_ns()}"
        self._unix = socket.socket(socket.AF_UNIX)
        self._unix.bind("\0" + self.abstract)
        self._unix.listen()
        places = [place for place in ("/tmp", "/dev/shm", str(Path.home())) if os.access(place, os.W_OK)]
        self._folders = [tempfile.TemporaryDirectory(dir=place) for place in places]
        self.hidden = [folder.name for folder in self._folders] + ["/etc/shadow", "/sys"]
        self._process = subprocess.Popen(["/bin/sh", "-c", "read _ # glm-jax-sentinel"], stdin=subprocess.PIPE)
        self.sentinel = str(self._process.pid)
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        self._process.stdin.close()
        for folder in self._folders:
            folder.cleanup()
        self._unix.close()
        self._listener.close()


def _gone(pid: int) -> bool:
    """Whether a process has ended, within a second."""
    end = time.monotonic() + 1.0
    while time.monotonic() < end:
        with suppress(OSError):
            os.kill(pid, 0)
            time.sleep(0.002)
            continue
        return True
    return False
