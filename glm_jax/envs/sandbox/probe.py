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

# Runs in the box and tries what it must not be able to do. Prints JSON of what succeeded.
_INSIDE = """
import ctypes, errno, json, os, socket, sys
port, abstract, hidden, pid = int(sys.argv[1]), sys.argv[2], sys.argv[3:-1], sys.argv[-1]
def works(f, *a):
    try:
        f(*a)
        return True
    except OSError:
        return False
def connect(family, address):
    with socket.socket(family, socket.SOCK_STREAM) as s:
        s.settimeout(2)
        s.connect(address)
def fill():
    with open("/app/full", "wb") as f:
        for _ in range(9):
            f.write(bytes(1 << 20))
            f.flush()
def fork_all():
    n = 0
    try:
        for n in range(64):
            if os.fork() == 0:
                import time; time.sleep(5); os._exit(0)
    except OSError:
        return n
    return 64
status = dict(l.split(":", 1) for l in open("/proc/self/status"))
libc = ctypes.CDLL(None, use_errno=True)
def traced():
    libc.ptrace(0, 0, 0, 0)
    return ctypes.get_errno() != errno.EPERM
seen = {
    "uid": os.getuid(),
    "capabilities": [k for k in ("CapPrm", "CapEff", "CapBnd", "CapAmb") if int(status[k], 16)],
    "no_new_privs": status["NoNewPrivs"].strip() == "1",
    "reached": [n for n, f, a in (("loopback", socket.AF_INET, ("127.0.0.1", port)),
                                  ("abstract socket", socket.AF_UNIX, chr(0) + abstract),
                                  ("1.1.1.1", socket.AF_INET, ("1.1.1.1", 53))) if works(connect, f, a)],
    "interfaces": [n for _, n in socket.if_nameindex() if n != "lo"],
    "vsock": works(lambda: socket.socket(40, socket.SOCK_STREAM).close()),
    "wrote": [d for d in ("/", "/usr", "/etc", "/dev", "/opt/glm_jax", os.path.dirname(sys.executable))
              if works(lambda: open(d + "/glm-jax-probe", "x"))],
    "hidden": [p for p in hidden if os.path.exists(p)],
    "processes": sorted(int(d) for d in os.listdir("/proc") if d.isdigit()),
    "host_process": os.path.exists("/proc/" + pid) and "glm-jax-sentinel" in open("/proc/%s/cmdline" % pid).read(),
    "supervisor": works(os.listdir, "/proc/1/fd"),
    "traced": traced(),
    "namespace": libc.unshare(0x10000000) == 0,
    "disk": works(fill),
    "forks": fork_all(),
}
print(json.dumps(seen), flush=True)
os.kill(-1, 9)
"""


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
        argv = [sys.executable, "-I", "-S", "-c", _INSIDE, str(host.port), host.abstract, *host.hidden, host.sentinel]
        result = box.run(argv, _LIMIT)
        try:
            seen = json.loads(str(result.out))
        except ValueError as error:
            raise SandboxUnavailable(f"the probe failed in its box, code {result.code}: {result.err}") from error
        check("not root", seen["uid"] != 0, f"uid {seen['uid']}")
        check("no capabilities", not seen["capabilities"] and seen["no_new_privs"], seen["capabilities"])
        check("network cut", not (seen["reached"] or seen["interfaces"] or seen["vsock"]), _network(seen))
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


def _network(seen: dict) -> str:
    reached = [*seen["reached"], *seen["interfaces"], *(["AF_VSOCK"] if seen["vsock"] else [])]
    return f"reached {reached}"


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
