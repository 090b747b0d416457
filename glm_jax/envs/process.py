"""The parent's handle of one worker process."""

from __future__ import annotations

import json
import os
import pickle
import socket
import subprocess
import sys
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

_PROGRAM = Path(__file__).with_name("worker.py")  # by path: it starts without importing the package
_KEEPER_LIMIT = 5.0  # seconds a keeper has to kill its tree; it takes milliseconds


class Worker:
    """A worker of glm_jax.envs.worker: started here, spoken to over a socket, killed with its whole tree."""

    def __init__(self, function: str, threads: int) -> None:
        ours, theirs = socket.socketpair()
        lifeline, self._lifeline = os.pipe()
        command = [sys.executable, "-P", str(_PROGRAM), str(theirs.fileno()), str(lifeline)]
        # A function that imports jax must not claim the accelerators of the run. Its own session keeps an
        # interrupt from the terminal away from it: the pool closes it in order.
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            pass_fds=(theirs.fileno(), lifeline),
            start_new_session=True,
            env={**os.environ, "JAX_PLATFORMS": "cpu"},
        )
        theirs.close()
        os.close(lifeline)
        self.connection = Connection(ours.detach())
        self._send(pickle.dumps({"function": function, "threads": threads, "path": sys.path}))

    def call(self, message: bytes) -> None:
        """Sends a pickled (number, arguments); the answer is read with `answer`. A dead worker shows there."""
        self._send(message)

    def answer(self) -> dict[str, Any] | None:
        """The next message of the worker, or None where it has died. Blocks until one is there."""
        try:
            return json.loads(self.connection.recv_bytes())
        except (EOFError, OSError, ValueError):
            return None

    def kill(self) -> None:
        """Ends the worker and all that it started, and waits until they are gone."""
        if self.connection.closed:
            return
        self.connection.close()
        os.close(self._lifeline)
        try:
            self._process.wait(_KEEPER_LIMIT)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _send(self, message: bytes) -> None:
        try:
            self.connection.send_bytes(message)
        except OSError:
            pass  # it has died: reading the answer tells
