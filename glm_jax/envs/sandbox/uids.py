"""Unique user ids for boxes that root starts, leased through locks of one file."""

from __future__ import annotations

import errno
import fcntl
import os
import random
import struct

from glm_jax.envs.sandbox.errors import SandboxUnavailable

FIRST, COUNT = 60000, 5000
_FILE = "/run/glm-jax.uids"
_TRIES = 200


class Lease:
    """A user id that no other box on this machine has, until it is closed or this process ends.

    Byte n of the file is locked for FIRST + n, by a lock of the open file, which the kernel frees with its last holder.
    """

    def __init__(self) -> None:
        try:
            self._fd = os.open(_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise SandboxUnavailable(f"{_FILE}, where boxes lease user ids, cannot be opened: {error}") from error
        for _ in range(_TRIES):
            number = random.randrange(COUNT)
            try:
                fcntl.fcntl(self._fd, fcntl.F_OFD_SETLK, struct.pack("hhqqi4x", fcntl.F_WRLCK, 0, number, 1, 0))
            except OSError as error:
                if error.errno not in (errno.EAGAIN, errno.EACCES):
                    raise
                continue
            self.uid = FIRST + number
            return
        self.close()
        raise SandboxUnavailable(f"{_TRIES} of the user ids {FIRST} to {FIRST + COUNT - 1} tried, all in use by boxes")

    def close(self) -> None:
        os.close(self._fd)
