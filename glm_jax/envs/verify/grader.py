"""What a task's tests use to run a candidate: in a box of its own, inside the driver's, with data in and data out.

    import sys; sys.path.insert(0, "/grader"); import grader

Only the standard library is there. A candidate sees its own files (read-only, where the agent left them), what it is
given in /data, and an empty /tmp; never /tests, /logs or this process. What it returns is bytes or JSON: parsed here,
compared here, and nothing of it is ever imported, unpickled or evaluated here.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import random
import resource
import select
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_LOGS = "/logs/verifier"
_MOST = 8 << 20  # bytes of a candidate's output
_DEEPEST = 50  # levels of JSON
_LARGEST = 2 << 20  # bytes of JSON, which may take fifty times as many as values
_settings = json.load(open(os.path.join(os.path.dirname(os.path.abspath(__file__)), "settings.json")))
_limit = float(os.environ.get("GRADER_LIMIT", "inf"))  # seconds that any candidate gets
_record: list[dict] = []
PYTHON = _settings["python"]

# Calls a function of a file for each list of arguments. It shares a process with the candidate, so the driver believes
# none of it but the values, which it compares itself.
_CALLER = """
import importlib.util, json, os, sys
path, function = sys.argv[1:3]
answer = os.dup(1)
os.dup2(2, 1)
sys.path.insert(0, os.path.dirname(path))
cases = json.load(sys.stdin)
spec = importlib.util.spec_from_file_location("candidate", path)
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
call = getattr(module, function)
found = []
for case in cases:
    try:
        found.append({"value": call(*case)})
    except Exception as error:
        found.append({"raised": type(error).__name__})
with os.fdopen(answer, "w") as file:
    json.dump(found, file)
"""


class Failed(Exception):
    """The candidate did not do what was asked: the reward is 0, and this says why."""


@dataclass(frozen=True)
class Done:
    """A candidate that ended by itself or at its limit."""

    code: int
    out: bytes
    err: bytes
    seconds: float
    timed_out: bool


def seed() -> int:
    """Of the hidden inputs, drawn anew for each grading."""
    return int(os.environ["GRADER_SEED"])


def rng() -> random.Random:
    return random.Random(seed())


def read(path: str, limit: int = 1 << 20) -> bytes:
    """An artifact's bytes. Raises Failed where it is missing or too long."""
    try:
        with open(path, "rb") as file:
            data = file.read(limit + 1)
    except OSError as error:
        raise Failed(f"{path}: {error.strerror}") from error
    if len(data) > limit:
        raise Failed(f"{path} has more than {limit} bytes")
    return data


def parse(data: bytes) -> Any:
    """JSON as a value. Raises Failed where it is none, is too long, or nested so deeply that printing it would fail."""
    if len(data) > _LARGEST:
        raise Failed(f"JSON of {len(data)} bytes; {_LARGEST} are read")
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise Failed(f"no JSON: {str(error)[:200]}: {data[:100]!r}") from error
    level = [value]
    for _ in range(_DEEPEST):
        level = [
            below
            for one in level
            if isinstance(one, list | dict)
            for below in (one.values() if isinstance(one, dict) else one)
        ]
        if not level:
            return value
    raise Failed(f"JSON nested more than {_DEEPEST} deep")


def run(
    argv: Sequence[str],
    *,
    stdin: bytes = b"",
    files: Mapping[str, bytes] | None = None,
    timeout: float = 20.0,
) -> Done:
    """Runs a program in a candidate's box; `files` lie in /data, by relative path."""
    done = _run(argv, files or {}, stdin, timeout)
    if os.environ.get("GRADER_RECORD"):
        given = {name: data.decode("latin-1") for name, data in (files or {}).items()}
        _record.append({"argv": list(argv), "stdin": stdin.decode("latin-1"), "files": given})
        _record[-1]["out"] = done.out.decode("latin-1")
    return done


def output(argv: Sequence[str], **more: Any) -> bytes:
    """What a program prints. Raises Failed where it fails or runs too long."""
    done = run(argv, **more)
    if done.timed_out:
        raise Failed(f"{argv[0]} took too long")
    if done.code != 0:
        raise Failed(f"{' '.join(argv)} ended with code {done.code}: {done.err[-300:]!r}")
    return done.out


def call(
    path: str, function: str, cases: Sequence[Sequence[Any]], *, timeout: float = 20.0, site: bool = False
) -> list:
    """The results of a function of a Python file, as JSON values: {"value": ...} or {"raised": type} per case.

    Raises Failed unless there is exactly one result per case. `site`: with numpy and the other packages.
    """
    argv = [PYTHON, "-I", *([] if site else ["-S"]), "-c", _CALLER, path, function]
    done = _run(argv, {}, json.dumps(cases).encode(), timeout)
    if done.timed_out:
        raise Failed(f"{function} took more than {timeout:g} s for {len(cases)} cases")
    if not done.out:
        raise Failed(f"{path} gave no result, code {done.code}: {done.err[-300:].decode(errors='replace')}")
    found = parse(done.out)
    if not isinstance(found, list) or len(found) != len(cases):
        raise Failed(f"{path} gave {len(found) if isinstance(found, list) else 'no list of'} results of {len(cases)}")
    if not all(isinstance(one, dict) and len(one) == 1 for one in found):
        raise Failed(f"{path} gave something else than results")
    if os.environ.get("GRADER_RECORD"):
        _record.append({"path": path, "function": function, "cases": json.loads(json.dumps(cases)), "found": found})
    return found


def serve(
    argv: Sequence[str],
    handle: Callable[[Any], Any],
    *,
    files: Mapping[str, bytes] | None = None,
    timeout: float = 30.0,
    requests: int = 100_000,
) -> Done:
    """Runs a program that asks for a service: each line that it prints is a request, each answer a line of its input.

    `handle` gets the request as a JSON value and may raise Failed. The driver counts; the candidate cannot.
    """
    end, begin, asked, pending = time.monotonic() + min(timeout, _limit), time.monotonic(), 0, b""
    line = b"null"
    with _candidate(argv, files or {}, subprocess.PIPE) as (process, err):
        os.set_blocking(process.stdin.fileno(), False)
        while select.select([process.stdout], [], [], max(0.0, end - time.monotonic()))[0]:
            if not (piece := os.read(process.stdout.fileno(), 1 << 16)):
                if os.environ.get("GRADER_RECORD"):
                    _record.append({"argv": list(argv), "last": line.decode("latin-1")})
                return Done(_ended(process, end), b"", _written(err), time.monotonic() - begin, False)
            pending += piece
            if len(pending) > _MOST:
                raise Failed(f"a request of more than {_MOST} bytes")
            *lines, pending = pending.split(b"\n")
            for line in lines:
                asked += 1
                if asked > requests:
                    raise Failed(f"more than {requests} requests")
                _reply(process.stdin.fileno(), json.dumps(handle(parse(line))).encode() + b"\n", end)
        raise Failed(f"{argv[0]} took more than {timeout:g} s")


def _reply(fd: int, data: bytes, end: float) -> None:
    """Writes an answer; one who does not read it in time has failed, one who has ended needs none."""
    left = memoryview(data)
    while left:
        if not select.select([], [fd], [], max(0.0, end - time.monotonic()))[1]:
            raise Failed("it does not read its answers")
        try:
            left = left[os.write(fd, left) :]
        except BlockingIOError:
            continue
        except OSError:
            return


def same(got: Any, want: Any, tolerance: float = 0.0) -> bool:
    """Whether two JSON values are equal, types included; floats within a tolerance, relative above 1."""
    if type(got) is not type(want):
        return False
    if isinstance(want, dict):
        return got.keys() == want.keys() and all(same(got[key], want[key], tolerance) for key in want)
    if isinstance(want, list):
        return len(got) == len(want) and all(same(a, b, tolerance) for a, b in zip(got, want, strict=True))
    if isinstance(want, float):
        return got == want or (math.isfinite(got) and abs(got - want) <= tolerance * max(abs(want), 1.0))
    return got == want


def score(cost: float, start: float, best: float) -> float:
    """How far a cost went from the start state's to the best one known, on a log scale, within [0, 1]."""
    if cost <= 0 or start <= best:
        raise ValueError(f"a cost is above 0 and the start's above the best: {cost}, {start}, {best}")
    return min(1.0, max(0.0, (math.log(start) - math.log(cost)) / (math.log(start) - math.log(best))))


def main(verify: Callable[[], Mapping[str, float] | None]) -> None:
    """Grades: the reward is 1 where `verify` returns (metrics, if any), 0 where it raises Failed.

    A metric `reward` takes the place of the 1. Any other exception is an error of the verifier, and no reward.
    """
    try:
        reward, metrics = 1.0, dict(verify() or {})
    except Failed as error:
        print(f"failed: {error}".encode(errors="backslashreplace").decode())  # JSON may hold half a character
        reward, metrics = 0.0, {}
    if "reward" in metrics:
        reward = metrics.pop("reward")
    if os.environ.get("GRADER_RECORD"):
        with open(f"{_LOGS}/record.json", "w") as file:
            json.dump(_record, file)
    with open(f"{_LOGS}/reward.json", "w") as file:
        json.dump({"reward": reward, **metrics}, file)


@contextlib.contextmanager
def _candidate(argv: Sequence[str], files: Mapping[str, bytes], out: Any) -> Iterator[tuple[subprocess.Popen, Any]]:
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
            command = [*_settings["prefix"], "--ro-bind", folder, "/data", *_settings["sealed"]]
            command += ["--seccomp", str(code.fileno()), "--json-status-fd", str(status.fileno())]
            command += ["--chdir", _settings["workdir"]]
            for name, value in _settings["env"].items():
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
            raise RuntimeError(f"a candidate's box did not start: {_written(err)!r}")


def _bounded() -> None:
    with open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")  # the kernel takes a candidate before its driver
    resource.setrlimit(resource.RLIMIT_NPROC, (_settings["processes"], _settings["processes"]))


def _run(argv: Sequence[str], files: Mapping[str, bytes], stdin: bytes, timeout: float) -> Done:
    """Its output goes to files, which the driver's capped /tmp bounds."""
    begin, timed_out = time.monotonic(), False
    with tempfile.TemporaryFile() as out, _candidate(argv, files, out) as (process, err):
        try:
            process.communicate(stdin, min(timeout, _limit))
        except subprocess.TimeoutExpired:
            timed_out = True
        code = 124 if timed_out else process.returncode
        return Done(code, _written(out), _written(err), time.monotonic() - begin, timed_out)


def _written(file: Any) -> bytes:
    file.seek(0)
    data = file.read(_MOST + 1)
    if len(data) > _MOST:
        raise Failed(f"more than {_MOST} bytes of output")
    return data


def _ended(process: subprocess.Popen, end: float) -> int:
    try:
        return process.wait(max(0.1, end - time.monotonic()))
    except subprocess.TimeoutExpired:
        return 124
