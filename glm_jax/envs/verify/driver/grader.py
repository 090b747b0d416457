"""What a task's tests use to run a candidate: in a box of its own, inside the driver's, with data in and data out.

    import sys; sys.path.insert(0, "/grader"); import grader

Only the standard library is there. A candidate sees its own files (read-only, where the agent left them), what it is
given in /data, and an empty /tmp; never /tests, /logs or this process. What it returns is bytes or JSON: parsed here,
compared here, and nothing of it is ever imported, unpickled or evaluated here. Where tests read it with code of their
own, they bound it first and do so under a `deadline`.
"""

from __future__ import annotations

import json
import math
import os
import random
import select
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from candidate import MOST, PYTHON, Done, candidate, ended, finished, written
from patience import Failed, Overdue, deadline, running
from reading import parse, read, toml

__all__ = ["PYTHON", "Done", "Failed", "deadline", "read", "parse", "toml"]
__all__ += ["seed", "rng", "run", "output", "call", "serve", "same", "score", "main"]
_LOGS = "/logs/verifier"
_record: list[dict] = []

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


def seed() -> int:
    """Of the hidden inputs, drawn anew for each grading."""
    return int(os.environ["GRADER_SEED"])


def rng() -> random.Random:
    return random.Random(seed())


def run(
    argv: Sequence[str],
    *,
    stdin: bytes = b"",
    files: Mapping[str, bytes] | None = None,
    timeout: float = 20.0,
) -> Done:
    """Runs a program in a candidate's box; `files` lie in /data, by relative path."""
    done = finished(argv, files or {}, stdin, timeout)
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
    done = finished(argv, {}, json.dumps(cases).encode(), timeout)
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

    `handle` gets the request as a JSON value and may raise Failed; its time is the candidate's. The driver counts; the
    candidate cannot.
    """
    begin, asked, pending, line = time.monotonic(), 0, b"", b"null"
    with running(timeout) as left, candidate(argv, files or {}, subprocess.PIPE) as (process, err):
        end, out = time.monotonic() + left, process.stdout.fileno()
        os.set_blocking(process.stdin.fileno(), False)
        while (rest := end - time.monotonic()) > 0 and select.select([out], [], [], rest)[0]:
            if not (piece := os.read(out, 1 << 16)):
                if os.environ.get("GRADER_RECORD"):
                    _record.append({"argv": list(argv), "last": line.decode("latin-1")})
                return Done(ended(process, end), b"", written(err), time.monotonic() - begin, False)
            pending += piece
            if len(pending) > MOST:
                raise Failed(f"a request of more than {MOST} bytes")
            *lines, pending = pending.split(b"\n")
            for line in lines:
                asked += 1
                if asked > requests:
                    raise Failed(f"more than {requests} requests")
                with deadline(max(end - time.monotonic(), 0.0)):
                    reply = json.dumps(handle(parse(line))).encode() + b"\n"
                _reply(process.stdin.fileno(), reply, end)
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


@deadline()
def same(got: Any, want: Any, tolerance: float = 0.0) -> bool:
    """Whether two JSON values are equal, types included; floats within a tolerance, relative above 1."""
    return _same(got, want, tolerance)


def _same(got: Any, want: Any, tolerance: float) -> bool:
    if type(got) is not type(want):
        return False
    if isinstance(want, dict):
        return got.keys() == want.keys() and all(_same(got[key], want[key], tolerance) for key in want)
    if isinstance(want, list):
        return len(got) == len(want) and all(_same(a, b, tolerance) for a, b in zip(got, want, strict=True))
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
    except (Failed, Overdue) as error:
        print(f"failed: {error}".encode(errors="backslashreplace").decode())  # JSON may hold half a character
        reward, metrics = 0.0, {}
    if "reward" in metrics:
        reward = metrics.pop("reward")
    if os.environ.get("GRADER_RECORD"):
        with open(f"{_LOGS}/record.json", "w") as file:
            json.dump(_record, file)
    with open(f"{_LOGS}/reward.json", "w") as file:
        json.dump({"reward": reward, **metrics}, file)
