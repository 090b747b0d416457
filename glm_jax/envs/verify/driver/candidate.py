"""A candidate's box: its process within the driver's own box, what it is given, and what it says."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from patience import Failed, running

MOST = 8 << 20  # bytes of a candidate's output
SETTINGS = json.load(open(os.path.join(os.path.dirname(os.path.abspath(__file__)), "settings.json")))
PYTHON: str = SETTINGS["python"]


@dataclass(frozen=True)
class Done:
    """A candidate that ended by itself or at its limit."""

    code: int
    out: bytes
    err: bytes
    seconds: float
    timed_out: bool


def finished(argv: Sequence[str], files: Mapping[str, bytes], stdin: bytes, timeout: float) -> Done:
    """One that has run. Its output goes to files, which the driver's capped /tmp bounds."""
    begin, timed_out = time.monotonic(), False
    with running(timeout) as left, tempfile.TemporaryFile() as out, candidate(argv, files, out) as (process, err):
        try:
            process.communicate(stdin, left)
        except subprocess.TimeoutExpired:
            timed_out = True
        code = 124 if timed_out else process.returncode
        return Done(code, written(out), written(err), time.monotonic() - begin, timed_out)


@contextlib.contextmanager
def candidate(argv: Sequence[str], files: Mapping[str, bytes], out: Any) -> Iterator[tuple[subprocess.Popen, Any]]:
    """A candidate's process in its box, killed at the end with all in it, and the file of what it says on stderr."""
    here = os.path.dirname(os.path.abspath(__file__))
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as err, tempfile.TemporaryFile() as status:
        os.chmod(folder, 0o755)
        for name, data in files.items():
            path = os.path.join(folder, name)
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with open(path, "wb") as file:
                file.write(data)
        with open(os.path.join(here, "filter.bpf"), "rb") as code:
            command = [*SETTINGS["prefix"], "--ro-bind", folder, "/data", *SETTINGS["sealed"]]
            command += ["--seccomp", str(code.fileno()), "--json-status-fd", str(status.fileno())]
            command += ["--chdir", SETTINGS["workdir"]]
            for name, value in SETTINGS["env"].items():
                command += ["--setenv", name, value]
            process = subprocess.Popen(
                [*command, "--", *argv],
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=err,
                env={},  # or /proc/1/environ, which is bubblewrap's, tells the seed
                pass_fds=(code.fileno(), status.fileno()),
                preexec_fn=_bounded,  # or a candidate could use up the processes that the driver may start
            )
        try:
            yield process, err
        finally:
            # The kernel may end bubblewrap itself for the memory that its candidate takes: that is the candidate's.
            ended = process.poll() not in (None, -signal.SIGKILL, 128 + signal.SIGKILL)
            process.kill()
            process.wait()
            for stream in (process.stdin, process.stdout):
                with contextlib.suppress(OSError):  # what was still to be written to a process that has ended
                    if stream:
                        stream.close()
        status.seek(0)
        if ended and b"exit-code" not in status.read():  # no fault of the candidate's: no reward, not even 0
            raise RuntimeError(f"a candidate's box did not start: {written(err)!r}")


def _bounded() -> None:
    with open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")  # the kernel takes a candidate before its driver
    resource.setrlimit(resource.RLIMIT_NPROC, (SETTINGS["processes"], SETTINGS["processes"]))


def written(file: Any) -> bytes:
    """Raises Failed where it is too much."""
    file.seek(0)
    data = file.read(MOST + 1)
    if len(data) > MOST:
        raise Failed(f"more than {MOST} bytes of output")
    return data


def ended(process: subprocess.Popen, end: float) -> int:
    """The exit status of one that has closed its output, 124 where it goes on beyond the time `end`."""
    try:
        return process.wait(max(0.1, end - time.monotonic()))
    except subprocess.TimeoutExpired:
        return 124
