"""A box: an isolated, long-lived place for commands, spoken to through its supervisor."""

from __future__ import annotations

import ast
import fcntl
import importlib.util
import json
import marshal
import os
import select
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from glm_jax.envs.sandbox import bubblewrap, seccomp
from glm_jax.envs.sandbox.cgroup import Leaf
from glm_jax.envs.sandbox.errors import BoxDied, BoxError, SandboxUnavailable
from glm_jax.envs.sandbox.files import File, Tree
from glm_jax.envs.sandbox.limits import Limits, Output, Result
from glm_jax.envs.sandbox.uids import Lease

START_LIMIT = 30.0  # seconds for a box to answer first; it takes 20 ms on a quiet machine
GRACE = 15.0  # seconds beyond its time limit that a command's answer may take
DEFAULT = Limits()
_SUPERVISOR = Path(__file__).with_name("supervisor.py")


@dataclass(frozen=True)
class Collected:
    """Files copied out of a box, and (path, reason) of those that were not."""

    files: dict[str, File]
    refused: tuple[tuple[str, str], ...]


class Box:
    """Commands in it see a read-only system, no network, no other process, and write only into memory.

    `folders` are writable, the first is the work folder. `nesting` lets bubblewrap run within (for graders). One
    command runs at a time; its background processes stay until `stop` or `close`. Raises SandboxUnavailable where the
    machine cannot isolate. Usable from any thread; an asyncio caller wraps calls in `asyncio.to_thread`.
    """

    def __init__(
        self, limits: Limits = DEFAULT, *, folders: tuple[str, ...] = ("/app",), nesting: bool = False
    ) -> None:
        self.limits, self.folders = limits, folders
        self._lock = threading.Lock()
        self._closed = False
        self._lease = Lease() if os.geteuid() == 0 else None
        self._leaf = Leaf.new(limits.memory_mb, limits.processes)
        self._process: subprocess.Popen | None = None
        try:
            self._channel, self.pid = self._start(nesting)
        except BaseException:
            self.close()
            raise

    @property
    def uid(self) -> int:
        """The user id that commands run under."""
        return self._lease.uid if self._lease else os.geteuid()

    @property
    def memory_by(self) -> str:
        """Who holds the memory limit: the kernel ("cgroup") or the supervisor, ten times a second ("watchdog")."""
        return "cgroup" if self._leaf else "watchdog"

    def run(
        self,
        command: str | Sequence[str],
        timeout: float,
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        stdin: bytes = b"",
        output_bytes: int | None = None,
    ) -> Result:
        """Runs a program with its arguments, or a text in bash. Its environment is `environment()` and `env`.

        A command over `timeout` seconds is killed with everything that it started, also what left its process group.
        Raises BoxDied where the box has ended.
        """
        argv = ["/bin/bash", "-c", command] if isinstance(command, str) else list(command)
        kills = self._leaf.kills() if self._leaf else 0
        request = {
            "do": "run",
            "argv": argv,
            "timeout": timeout,
            "env": {**environment(), **(env or {})},
            "cwd": cwd or self.folders[0],
            "output": output_bytes or self.limits.output_bytes,
        }
        reply, data = self._ask(request, stdin, timeout + GRACE)
        parts, at = [], 0
        for size in reply["parts"]:
            parts.append(data[at : at + size])
            at += size
        return Result(
            code=reply["code"],
            out=Output(parts[0], parts[1], reply["totals"][0]),
            err=Output(parts[2], parts[3], reply["totals"][1]),
            timed_out=reply["timed_out"],
            out_of_memory=reply["out_of_memory"] or (self._leaf is not None and self._leaf.kills() > kills),
            seconds=reply["seconds"],
        )

    def put(self, files: Tree) -> None:
        """Writes files by their absolute paths, and the folders above them. Raises BoxError where that fails."""
        listed = [[path, file.mode, len(file.data)] for path, file in files.items()]
        self._ask({"do": "write", "files": listed}, b"".join(file.data for file in files.values()))

    def get(self, path: str, limit: int = 1 << 20) -> tuple[bytes, int]:
        """The first `limit` bytes of a regular file, as a command in the box would see it, and its size."""
        reply, data = self._ask({"do": "read", "path": path, "limit": limit})
        return data, reply["size"]

    def stop(self) -> None:
        """Ends every process in the box; its files stay."""
        self._ask({"do": "stop"})

    def collect(self, paths: Sequence[str], limit: int = 64 << 20, most: int = 4096) -> Collected:
        """Ends every process, then copies the regular files at and below `paths`, following no link.

        Each is read once, so nothing can change between a check and its use. Links, FIFOs, devices, files with a second
        name, and what exceeds `limit` bytes or `most` files are refused, with the reason.
        """
        self.stop()
        reply, data = self._ask({"do": "collect", "paths": list(paths), "limit": limit, "most": most})
        files: dict[str, File] = {}
        at = 0
        for path, mode, size in reply["taken"]:
            files[path] = File(data[at : at + size], mode)
            at += size
        return Collected(files, tuple((path, reason) for path, reason in reply["refused"]))

    def close(self) -> None:
        """Ends the box and all that is in it. May be called twice."""
        if self._closed:
            return
        self._closed = True
        if self._process is not None:
            if hasattr(self, "_channel"):
                self._channel.close()  # on which the supervisor exits, and its namespace with it
            else:
                self._process.kill()
            try:
                self._process.wait(GRACE)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process.stderr.close()
        if self._leaf:
            self._leaf.close()
        if self._lease:
            self._lease.close()

    def __enter__(self) -> Box:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self, nesting: bool) -> tuple[socket.socket, int]:
        """The channel to the supervisor and its process id on the host, once it answers."""
        root, uid = self._lease is not None, self.uid
        ours, theirs = socket.socketpair()
        info_read, info_write = os.pipe()
        filter_fd = _memory_file(seccomp.program(nesting, watched=self._leaf is None))
        users = _memory_file(f"root:x:0:0::/nonexistent:/bin/false\nbox:x:{uid}:{uid}::/tmp:/bin/bash\n".encode())
        groups = _memory_file(f"root:x:0:\nbox:x:{uid}:\n".encode())
        doors = self._leaf.doors() if self._leaf else []
        program = _memory_file(_compiled())
        fds = (theirs.fileno(), info_write, filter_fd, users, groups, program, *doors)
        settings = {
            "uid": uid if root else None,
            "fresh_proc": nesting,
            "groups": doors,
            "watch_mb": 0 if self._leaf else self.limits.memory_mb,
            "processes": self.limits.processes,
            "open_files": self.limits.open_files,
        }
        command = [
            *(bubblewrap.program(), *bubblewrap.namespaces(root, nesting), "--as-pid-1"),
            *("--info-fd", str(info_write), "--seccomp", str(filter_fd)),
            *bubblewrap.system(),
            *bubblewrap.writable(self.folders, self.limits.disk_mb),
            *bubblewrap.python(),
            *("--perms", "0644", "--file", str(users), "/etc/passwd"),
            *("--perms", "0644", "--file", str(groups), "/etc/group"),
            *("--perms", "0755", "--dir", "/opt", "--perms", "0755", "--dir", "/opt/glm_jax"),
            *("--perms", "0644", "--file", str(program), bubblewrap.SUPERVISOR),
            *bubblewrap.sealed(),
            *("--", os.path.realpath(sys.executable), "-I", "-S", bubblewrap.SUPERVISOR),
            *(str(theirs.fileno()), repr(settings)),
        ]
        try:
            # The kernel ends a child with the thread that started it (--die-with-parent): one thread starts them all.
            self._process = (
                _starter(os.getpid())
                .submit(
                    subprocess.Popen,
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.PIPE,
                    pass_fds=fds,
                )
                .result()
            )
        finally:
            theirs.close()
            for fd in fds[1:]:
                os.close(fd)
        try:
            pid = _pid(info_read)
            self._channel = ours
            reply, _ = self._receive(START_LIMIT)
            if pid is None or "ready" not in reply:
                raise BoxDied("no process id")
            return ours, pid
        except (BoxDied, OSError) as error:
            said = self._last_words() or str(error)
            raise SandboxUnavailable(f"bubblewrap started no box: {said}{_remedy(said)}") from error
        finally:
            os.close(info_read)

    def _ask(self, request: dict[str, Any], payload: bytes = b"", limit: float = GRACE) -> tuple[dict, bytes]:
        with self._lock:
            if self._closed:
                raise BoxDied("this box is closed")
            text = repr(request).encode()
            try:
                self._channel.settimeout(limit)
                self._channel.sendall(struct.pack(">II", len(text), len(payload)) + text + payload)
            except OSError as error:
                raise BoxDied(f"a box ended by itself: {self._last_words() or error}") from error
            reply, data = self._receive(limit)
        if "error" in reply:
            raise BoxError(reply["error"])
        return reply, data

    def _receive(self, limit: float) -> tuple[dict, bytes]:
        end = time.monotonic() + limit
        sizes = struct.unpack(">II", self._exactly(8, end, limit))
        text, payload = (self._exactly(size, end, limit) for size in sizes)
        return ast.literal_eval(text.decode()), payload

    def _exactly(self, size: int, end: float, limit: float) -> bytes:
        data = bytearray()
        while len(data) < size:
            self._channel.settimeout(max(0.001, end - time.monotonic()))
            try:
                piece = self._channel.recv(min(size - len(data), 1 << 20))
            except TimeoutError as error:
                self._process.kill()
                raise BoxDied(f"a box gave no answer within {limit:g} s and was ended") from error
            except OSError as error:
                raise BoxDied(f"a box ended by itself: {error}") from error
            if not piece:
                raise BoxDied(f"a box ended by itself: {self._last_words()}")
            data += piece
        return bytes(data)

    def _last_words(self) -> str:
        """What bubblewrap or the supervisor wrote before it ended."""
        with suppress(subprocess.TimeoutExpired, ValueError):
            self._process.wait(1.0)
            return " ".join(self._process.stderr.read(4096).decode(errors="backslashreplace").split())
        return ""


def environment() -> dict[str, str]:
    """What a command's environment holds if nothing is added."""
    return {
        "PATH": f"{sys.prefix}/bin:{bubblewrap.PATH}",
        "HOME": "/tmp",
        "LANG": "C.UTF-8",
        "TERM": "dumb",
        "JAX_PLATFORMS": "cpu",
        "PYTHONDONTWRITEBYTECODE": "1",
    }


@cache
def _compiled() -> bytes:
    """The supervisor as a .pyc, which starts several milliseconds sooner than its text."""
    code = compile(_SUPERVISOR.read_text(), bubblewrap.SUPERVISOR, "exec")
    return importlib.util.MAGIC_NUMBER + bytes(12) + marshal.dumps(code)  # as of flags, time and size: none


@cache
def _starter(_: int) -> ThreadPoolExecutor:
    """The thread that starts boxes, one per process, as long as the process lives."""
    return ThreadPoolExecutor(1, thread_name_prefix="sandbox")


def _memory_file(data: bytes) -> int:
    fd = os.memfd_create("glm-jax")
    os.write(fd, data)
    os.lseek(fd, 0, os.SEEK_SET)
    fcntl.fcntl(fd, fcntl.F_SETFD, 0)
    return fd


def _pid(info: int) -> int | None:
    """The process id that bubblewrap writes for its child."""
    text, end = b"", time.monotonic() + START_LIMIT
    while b"}" not in text and select.select([info], [], [], max(0.0, end - time.monotonic()))[0]:
        if not (piece := os.read(info, 4096)):
            return None
        text += piece
    return json.loads(text)["child-pid"] if b"}" in text else None


def _remedy(said: str) -> str:
    """What to do about a known refusal."""
    if "Unknown option" in said:
        return "; bubblewrap 0.8 or later is wanted"
    if "namespace" in said or "Operation not permitted" in said or "uid map" in said:
        return (
            "; user namespaces seem to be off: sysctl kernel.unprivileged_userns_clone=1 "
            "user.max_user_namespaces=10000 (Ubuntu: kernel.apparmor_restrict_unprivileged_userns=0; "
            "in a container: --privileged)"
        )
    return ""
