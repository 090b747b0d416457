"""One control group per box, where this process may make some: the only cap on memory that the kernel itself holds.

A leaf is new for each box and removed after it: the processes of a closed box count for a while after their end, so a
reused leaf refuses forks to its next owner.
"""

from __future__ import annotations

import itertools
import os
import shlex
import subprocess
import threading
import time
from contextlib import suppress
from functools import cache
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")
_REMOVAL_LIMIT = 2.0  # seconds until an ended box's leaf has to be free; it takes milliseconds
_numbers = itertools.count()
_keeper_lock = threading.Lock()
# Removes this process's leaves once its standard input ends, which the kernel sees to even after kill -9.
_KEEPER = """read _; n=0
while [ $n -lt 100 ]; do
    rmdir {leaves}; left=; for d in {leaves}; do [ -d "$d" ] && left=1; done
    [ "$left" ] || exit 0; sleep 0.1; n=$((n+1))
done"""


class Leaf:
    """A group of its own under each parent; `new` gives None where this process may not make one."""

    def __init__(self, folders: list[Path]) -> None:
        self._folders = folders

    @classmethod
    def new(cls, memory_mb: int, processes: int, parents: tuple[Path, ...] | None = None) -> Leaf | None:
        """A leaf below `parents` (default: this process's own groups) with both limits set."""
        parents = _parents() if parents is None else parents
        name, size = f"{_prefix()}{next(_numbers)}", str(memory_mb << 20)
        leaf = cls([])
        try:
            for parent in parents:
                (parent / name).mkdir()
                leaf._folders.append(parent / name)
            written = [leaf._set("memory.limit_in_bytes", size), leaf._set("memory.max", size)]
            leaf._set("memory.memsw.limit_in_bytes", size)
            leaf._set("memory.swap.max", "0")
            if any(written) and leaf._set("pids.max", str(processes)):
                _keep(parents)
                return leaf
        except OSError:
            pass
        leaf.close()
        return None

    def doors(self) -> list[int]:
        """Open files by which a process joins: it writes 0. The right to is the opener's, so a box may use them."""
        return [os.open(folder / "cgroup.procs", os.O_WRONLY) for folder in self._folders]

    def kills(self) -> int:
        """Processes that the kernel has killed here for want of memory."""
        for folder in self._folders:
            for name in ("memory.oom_control", "memory.events"):
                with suppress(OSError):
                    lines = dict(line.split(" ", 1) for line in (folder / name).read_text().splitlines())
                    return int(lines.get("oom_kill", 0))
        return 0

    def close(self) -> None:
        """Removes the group, whose processes have to have ended."""
        end = time.monotonic() + _REMOVAL_LIMIT
        for folder in self._folders:
            while True:
                try:
                    folder.rmdir()
                    break
                except FileNotFoundError:
                    break
                except OSError:
                    if time.monotonic() > end:
                        break  # the keeper tries again at the end of this process
                    time.sleep(0.002)

    def _set(self, name: str, value: str) -> bool:
        """Writes a limit in the folder whose controller has it; whether there is one."""
        for folder in self._folders:
            if (folder / name).exists():
                (folder / name).write_text(value)
                return True
        return False


def _prefix() -> str:
    return f"glm-jax-{os.getpid()}-"


@cache
def _parents() -> tuple[Path, ...]:
    """This process's groups that count memory and processes: two folders of version 1, or one of version 2."""
    paths = {}
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        paths |= {name: path for name in controllers.split(",")}
    if {"memory", "pids"} <= paths.keys():
        return tuple(dict.fromkeys(_ROOT / name / paths[name].lstrip("/") for name in ("memory", "pids")))
    own = _ROOT / paths.get("", "/").lstrip("/")
    for folder in (own, own.parent):  # a group with processes of its own hands no controller on, its parent may
        with suppress(OSError):
            if {"memory", "pids"} <= set((folder / "cgroup.subtree_control").read_text().split()):
                return (folder,)
    return (own,)


def _keep(parents: tuple[Path, ...]) -> None:
    """One keeper for this process and these parents."""
    with _keeper_lock:
        _start_keeper(os.getpid(), parents)


@cache
def _start_keeper(_: int, parents: tuple[Path, ...]) -> subprocess.Popen:
    leaves = " ".join(f"{shlex.quote(str(parent))}/{_prefix()}*" for parent in parents)
    return subprocess.Popen(
        ["/bin/sh", "-c", _KEEPER.replace("{leaves}", leaves)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        cwd="/",
    )
