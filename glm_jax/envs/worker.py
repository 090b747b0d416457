"""A process that calls a function, beside a keeper that kills it with all its descendants.

`python -P worker.py SOCKET LIFELINE` (two inherited file descriptors) forks at once. The child imports the
user's function and serves calls on the socket. The keeper runs no user code: it waits until the lifeline reaches its
end, which the kernel sees to even when the parent is killed with -9, or until the child is gone, and then kills
everything that descends from it. So a function that holds the interpreter's lock, or starts programs of its own, cannot
outlive the run.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import numbers
import os
import select
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

_SET_DEATH_SIGNAL, _SET_SUBREAPER = 1, 36  # prctl(2)


def main(socket: int, lifeline: int) -> None:
    """Forks into keeper and worker. Returns in neither."""
    keeper = os.getpid()
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_write, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake_write)
    _prctl(_SET_SUBREAPER, 1)  # descendants whose parent ends become the keeper's children, so none gets lost
    child = os.fork()
    if child == 0:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for fd in (lifeline, wake_read, wake_write):
            os.close(fd)
        os.setsid()
        _prctl(_SET_DEATH_SIGNAL, signal.SIGKILL)
        if os.getppid() == keeper:
            _serve(Connection(socket))
        os._exit(0)
    os.close(socket)
    while True:
        ready, _, _ = select.select([lifeline, wake_read], [], [])
        if lifeline in ready or _gone(child):
            break
        os.read(wake_read, 1024)  # some other descendant ended
    _kill_descendants(child)
    os._exit(0)


def load(name: str) -> Callable[..., Any]:
    """The function that `name`, of the form module:function, stands for. Raises ValueError that says what is wrong."""
    module_name, _, function_name = name.partition(":")
    if not module_name or not function_name:
        raise ValueError(f"{name!r} is not of the form module:function")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        raise ValueError(f"module {module_name!r} cannot be imported: {describe(error)}") from error
    function = getattr(module, function_name, None)
    if not callable(function):
        raise ValueError(f"module {module_name!r} ({module.__file__}) has no function {function_name!r}")
    if prepare := getattr(function, "prepare", None):
        try:
            prepare()
        except Exception as error:
            raise ValueError(f"{name}.prepare() failed: {describe(error)}") from error
    return function


def describe(error: BaseException) -> str:
    """An exception in one line, with the place that raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}{place}"


def _serve(connection: Connection) -> None:
    """Loads the function that the first message names, then answers each (number, arguments) with one JSON object.

    A call without a number gets no answer. With one thread, calls are made in the main one, as user code may expect.
    """
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what user code prints is no part of the run's output
    try:
        start = connection.recv()
        sys.path[:] = start["path"]
        try:
            function = load(start["function"])
        except ValueError as error:
            connection.send_bytes(json.dumps({"failed": str(error)}).encode())
            return
        connection.send_bytes(json.dumps({"ready": True}).encode())
        sending = threading.Lock()

        def handle(number: int | None, arguments: tuple) -> None:
            answer = _call(function, arguments)
            if number is not None:
                data = json.dumps({"number": number, **answer}).encode()
                with sending:
                    connection.send_bytes(data)

        if start["threads"] == 1:
            while True:
                handle(*connection.recv())
        with ThreadPoolExecutor(start["threads"]) as pool:
            while True:
                pool.submit(handle, *connection.recv())
    except (EOFError, ConnectionError):
        return  # the pool is closed


def _call(function: Callable[..., Any], arguments: tuple) -> dict:
    try:
        value = function(*arguments)
        plain = _plain(value)
        if plain is not None:
            return {"value": plain}
    except BaseException as error:  # SystemExit too: user code must not end the worker
        return {"cause": "raised", "detail": describe(error)}
    return {"cause": "not_a_number", "detail": f"it returned {_shown(value)} ({type(value).__name__})"}


def _plain(value: Any) -> Any:
    """A number, or a dict whose numbers are plain, as JSON may hold it; None for anything else.

    Numbers of numpy and of arrays without axes count. A text is none, whatever float() makes of it.
    """
    if isinstance(value, dict):
        return {str(key): _item(inner) for key, inner in value.items()}
    return None if isinstance(value, str) else _number(value)


def _item(value: Any) -> Any:
    if value is None or isinstance(value, (str, bool, int, float)):
        return value
    if isinstance(value, dict):
        return _plain(value)
    if isinstance(value, (list, tuple)):
        return [_item(inner) for inner in value]
    number = _number(value)
    return _shown(value) if number is None else number


def _number(value: Any) -> float | None:
    if not isinstance(value, numbers.Real) and getattr(value, "shape", None) != ():
        return None
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return None


def _shown(value: Any) -> str:
    return f"{value!r:.100}"


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def _gone(child: int) -> bool:
    """Whether the child has ended; it is left unreaped, so that its number stays its own."""
    return os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _kill_descendants(child: int) -> None:
    """Kills and reaps until this process has no child left."""
    while True:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(child, signal.SIGKILL)
        for pid in _descendants(os.getpid()):
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def _descendants(root: int) -> set[int]:
    """Process ids below `root`, from /proc; empty on systems that have none, where the process group has to do."""
    parents = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError, ValueError, IndexError):
            # The command's name, in brackets, may hold anything; the parent is the second field after it.
            parents[int(entry.parent.name)] = int(entry.read_text(errors="replace").rpartition(")")[2].split()[1])
    found, before = {root}, -1
    while len(found) != before:
        before = len(found)
        found |= {pid for pid, parent in parents.items() if parent in found}
    return found - {root}


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
