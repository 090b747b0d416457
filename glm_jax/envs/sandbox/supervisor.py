"""PID 1 of a box: runs commands and moves files for the host, over one inherited socket.

`python -I -S supervisor.py SOCKET SETTINGS` (a file descriptor; a dict's repr) knows nothing of the package: only the
standard library is there. Start-up time is most of what a box costs: hence the C modules _signal and _socket, and
frames of Python literals (json, signal and socket take as long to import as the interpreter to start).

It gives up root and every capability before its first command. Commands run under its own uid, yet cannot touch it: the
kernel hides init from signals of its namespace, and as it is not dumpable no process of its uid can trace it or open
its files. When the host's end of the socket closes, also by kill -9, it exits, and the kernel kills whatever is left.

A frame is `>II` (bytes of the literal, bytes of payload), then both. The host reads what comes out of a box with
ast.literal_eval; what the supervisor evaluates comes from the host alone.
"""

from __future__ import annotations

import _signal as signal
import _socket as socket
import ctypes
import os
import resource
import select
import stat
import struct
import sys
import time

TYPE_CHECKING = False  # as typing has it, which costs start-up time
if TYPE_CHECKING:
    from collections.abc import Callable

_PIECE = 1 << 16
_SET_DUMPABLE, _DROP_BOUNDING, _AMBIENT, _CLEAR_ALL = 4, 24, 47, 4  # prctl(2)
_LAST_CAPABILITY = 63
_HARDENED_MOUNT = 2 | 4 | 8  # nosuid, nodev, noexec
_WATCH, _TIDY = 0.1, 0.5  # seconds between two looks at the memory, at what has ended
_LONGEST = 4096  # characters of a path that is collected
_KILL_LIMIT = 2.0  # seconds that a tree has to die before everything in the box is killed

_libc = ctypes.CDLL(None, use_errno=True)


def main(control: int, settings: dict) -> None:
    for fd in (control, *settings["groups"]):
        os.set_inheritable(fd, False)
    _become(settings)
    channel = socket.socket(fileno=control)
    box = Supervisor(channel, settings)
    _send(channel, {"ready": True})
    while True:
        header, payload = box.next_request()
        answer = getattr(box, "do_" + header.pop("do"))
        try:
            reply, data = answer(payload, **header)
        except (OSError, ValueError) as error:
            reply, data = {"error": f"{type(error).__name__}: {error}"}, b""
        _send(channel, reply, data)


def _become(settings: dict) -> None:
    """Ends with the box's uid, no capability, no way back, and not dumpable."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)  # which init never receives from inside
    if settings["uid"] is not None:
        if settings["fresh_proc"]:
            # bwrap covers parts of /proc, and the kernel lets an unprivileged box mount /proc only if it sees it whole.
            _check(_libc.mount(b"proc", b"/proc", b"proc", _HARDENED_MOUNT, None), "mount /proc")
        for capability in range(_LAST_CAPABILITY + 1):
            _libc.prctl(_DROP_BOUNDING, capability, 0, 0, 0)  # fails above the last one that the kernel knows
        os.setgroups([])
        os.setresgid(settings["uid"], settings["uid"], settings["uid"])
        os.setresuid(settings["uid"], settings["uid"], settings["uid"])
    _libc.prctl(_AMBIENT, _CLEAR_ALL, 0, 0, 0)
    header, none = struct.pack("Ii", 0x20080522, 0), bytes(24)
    _check(_libc.capset(header, none), "capset")
    _check(_libc.prctl(_SET_DUMPABLE, 0, 0, 0, 0), "prctl")
    os.umask(0o022)
    # Inherited by commands; one process more, as this one counts too.
    for limit, value in ((resource.RLIMIT_NPROC, settings["processes"] + 1), (resource.RLIMIT_CORE, 0)):
        resource.setrlimit(limit, (value, value))
    resource.setrlimit(resource.RLIMIT_NOFILE, (settings["open_files"], settings["open_files"]))


def _check(status: int, what: str) -> None:
    if status != 0:
        raise OSError(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")


class _Capture:
    """Head and tail of a stream."""

    def __init__(self, fd: int, limit: int) -> None:
        os.set_blocking(fd, False)
        self.fd, self.total, self.open = fd, 0, True
        self._head, self._tail, self._half = bytearray(), bytearray(), max(1, limit // 2)

    def read(self) -> bool:
        """Takes in what is there; False where nothing was."""
        try:
            piece = os.read(self.fd, _PIECE)
        except BlockingIOError:
            return False
        except OSError:
            piece = b""
        if not piece:
            self.open = False
            return False
        self.total += len(piece)
        room = self._half - len(self._head)
        self._head += piece[:room]
        self._tail = (self._tail + piece[room:])[-self._half :] if room < len(piece) else self._tail
        return True

    def close(self) -> tuple[bytes, bytes, int]:
        """What was kept, after a last look; a process that holds the stream open is not waited for."""
        for _ in range(64):
            if not self.open or not self.read():
                break
        os.close(self.fd)
        return bytes(self._head), bytes(self._tail), self.total


class Supervisor:
    def __init__(self, channel: socket.socket, settings: dict) -> None:
        self.channel, self.settings = channel, settings

    def next_request(self) -> tuple[dict, bytes]:
        """The host's next frame. Meanwhile it reaps what ends and, where no cgroup does, watches the memory."""
        while True:
            others = len(_pids()) > 0
            wait = (_WATCH if self.settings["watch_mb"] else _TIDY) if others else None
            if select.select([self.channel], [], [], wait)[0]:
                break
            _reap()
            self._over_memory()
        return _receive(self.channel)

    def do_run(
        self, stdin: bytes, argv: list[str], timeout: float, env: dict[str, str], cwd: str, output: int
    ) -> tuple[dict, bytes]:
        """Runs a command to its end or its limit. Processes of earlier commands stay, its own only where it ends."""
        before, start = _pids(), time.monotonic()
        pipes = [os.pipe() for _ in range(3)]
        (stdin_read, stdin_write), (out_read, out_write), (err_read, err_write) = pipes
        try:
            child = os.fork()
        except OSError:  # the box is full of processes
            for fd in (fd for pipe in pipes for fd in pipe):
                os.close(fd)
            raise
        if child == 0:
            self._exec(argv, env, cwd, (stdin_read, out_write, err_write))
        for fd in (stdin_read, out_write, err_write):
            os.close(fd)
        out, err = _Capture(out_read, output), _Capture(err_read, output)
        timed_out, memory = self._follow(child, stdin, stdin_write, out, err, before, start + timeout)
        _, status = os.waitpid(child, 0)
        if timed_out or memory:
            _await(lambda: _pids() <= before)
        _reap()
        code = os.waitstatus_to_exitcode(status)
        seconds = time.monotonic() - start
        (out_head, out_tail, out_total), (err_head, err_tail, err_total) = out.close(), err.close()
        reply = {
            "code": code if code >= 0 else 128 - code,
            "timed_out": timed_out,
            "out_of_memory": memory,
            "seconds": seconds,
            "parts": [len(out_head), len(out_tail), len(err_head), len(err_tail)],
            "totals": [out_total, err_total],
        }
        return reply, out_head + out_tail + err_head + err_tail

    def _exec(self, argv: list[str], env: dict[str, str], cwd: str, streams: tuple[int, int, int]) -> None:
        """In the child: becomes the command. Never returns."""
        what = "the control group"
        try:
            for group in self.settings["groups"]:
                os.write(group, b"0")  # joins; the supervisor stays outside, where no limit of the box's can end it
            for target, fd in enumerate(streams):
                os.dup2(fd, target)
            os.setsid()
            signal.signal(signal.SIGPIPE, signal.SIG_DFL)
            what = cwd
            os.chdir(cwd)
            what = argv[0]
            for program in _candidates(argv[0], env.get("PATH", "")):
                try:
                    os.execve(program, argv, env)
                except (FileNotFoundError, NotADirectoryError) as error:
                    missing = error
            raise missing
        except (OSError, ValueError) as error:  # ValueError: a zero byte, or what is no text
            said = getattr(error, "strerror", None) or error
            os.write(2, f"{what}: {said}\n".encode(errors="backslashreplace"))
        finally:
            os._exit(127)

    def _follow(
        self,
        child: int,
        stdin: bytes,
        stdin_fd: int,
        out: _Capture,
        err: _Capture,
        before: set[int],
        deadline: float,
    ) -> tuple[bool, bool]:
        """Feeds and reads the command until it has ended, then returns (timed out, out of memory)."""
        pidfd = os.pidfd_open(child)
        os.set_blocking(stdin_fd, False)
        feeding, left = True, memoryview(stdin)
        timed_out = memory = False
        poll = select.poll()
        for fd in (self.channel.fileno(), pidfd, out.fd, err.fd):
            poll.register(fd, select.POLLIN)
        poll.register(stdin_fd, select.POLLOUT)
        while True:
            remaining = deadline - time.monotonic()
            if remaining <= 0 and not (timed_out or memory):
                timed_out = True
                self._kill_tree(before)
            wait = min(remaining, _WATCH if self.settings["watch_mb"] else _TIDY)
            ready = dict(poll.poll(max(wait, 0.001) * 1000))
            if self.channel.fileno() in ready:
                os._exit(0)  # the host waits for an answer: only its end can be readable
            for capture in (out, err):
                if capture.fd in ready and not capture.read() and not capture.open:
                    poll.unregister(capture.fd)
            if stdin_fd in ready and feeding:
                try:
                    left = left[os.write(stdin_fd, left[:_PIECE]) :]
                except BlockingIOError:
                    pass
                except OSError:
                    left = left[:0]
                if not left:
                    feeding = False
                    poll.unregister(stdin_fd)
                    os.close(stdin_fd)
            if pidfd in ready:
                break
            memory = self._over_memory() or memory
            _reap(but=child)
        if feeding:
            os.close(stdin_fd)
        os.close(pidfd)
        return timed_out, memory

    def _over_memory(self) -> bool:
        """Kills everything where the processes together hold more than the limit. Only where no cgroup counts."""
        limit = self.settings["watch_mb"] << 20
        if not limit or sum(map(_resident, _pids())) <= limit:
            return False
        _kill_all()
        return True

    def _kill_tree(self, before: set[int]) -> None:
        """Kills every process that was not there `before`: a daemon has left its parent and its group, not the box."""
        end = time.monotonic() + _KILL_LIMIT
        while before and time.monotonic() < end:
            new = [pid for pid in _pids() - before if not _zombie(pid)]
            if not new:
                return
            for number in (signal.SIGSTOP, signal.SIGKILL):  # stopped first, or a fork bomb outruns the loop
                for pid in new:
                    try:
                        os.kill(pid, number)
                    except ProcessLookupError:
                        pass
        _kill_all()

    def do_stop(self, _: bytes) -> tuple[dict, bytes]:
        """Ends every process in the box."""
        _kill_all()
        if not _await(lambda: not _pids()):
            raise OSError(f"{len(_pids())} processes did not end within {_KILL_LIMIT:g} s")
        return {}, b""

    def do_write(self, payload: bytes, files: list[list]) -> tuple[dict, bytes]:
        """Writes (path, mode, bytes) from the payload, with the folders above them."""
        at = 0
        for path, mode, size in files:
            os.makedirs(os.path.dirname(path) or "/", exist_ok=True)
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NONBLOCK, 0o600)
            with open(fd, "wb") as file:  # a FIFO fails to open, so nothing blocks
                file.write(payload[at : at + size])
                os.fchmod(fd, mode)
            at += size
        return {}, b""

    def do_read(self, _: bytes, path: str, limit: int) -> tuple[dict, bytes]:
        """The first `limit` bytes of a regular file, links followed inside the box."""
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        with open(fd, "rb") as file:
            found = os.fstat(fd)
            if not stat.S_ISREG(found.st_mode):
                raise ValueError(f"{path} is no regular file")
            return {"size": found.st_size}, file.read(limit)

    def do_collect(self, _: bytes, paths: list[str], limit: int, most: int) -> tuple[dict, bytes]:
        """Regular files at and below `paths`, each read once, none through a link; and why others were left out.

        What is left out: anything else than a regular file, a file with a second name, what exceeds `limit` bytes or
        `most` files and folders in all, what lies so deep that paths would hold more than the files.
        """
        too_much = f"more than {limit} bytes or {most} files in all"
        folders = 0
        taken: list[list] = []
        refused: list[list[str]] = []
        data = bytearray()

        def walk(folder: int, name: str, path: str) -> None:
            nonlocal folders
            if len(path) > _LONGEST:
                refused.append([path, f"a path of more than {_LONGEST} characters"])
                return
            try:
                fd = os.open(name, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW, dir_fd=folder)
            except OSError as error:
                refused.append([path, "a link" if error.errno == 40 else str(error.strerror)])
                return
            try:
                found = os.fstat(fd)
                if stat.S_ISDIR(found.st_mode):
                    folders += 1
                    for entry in sorted(os.listdir(fd)):
                        if len(taken) + len(refused) + folders > most:
                            if not refused or refused[-1][1] != too_much:
                                refused.append([f"{path}/{entry}", too_much])
                            return
                        walk(fd, entry, f"{path}/{entry}")
                elif not stat.S_ISREG(found.st_mode):
                    refused.append([path, "no regular file"])
                elif found.st_nlink != 1:
                    refused.append([path, "a file with a second name"])
                elif len(data) + found.st_size > limit or len(taken) >= most:
                    refused.append([path, too_much])
                else:
                    with open(fd, "rb", closefd=False) as file:
                        piece = file.read(found.st_size)
                    taken.append([path, stat.S_IMODE(found.st_mode), len(piece)])
                    data.extend(piece)
            except RecursionError:
                refused.append([path, "too deep"])
            finally:
                os.close(fd)

        for path in paths:
            parts = [part for part in path.split("/") if part]
            folder = os.open("/", os.O_RDONLY | os.O_DIRECTORY)
            try:
                for part in parts[:-1]:
                    above, folder = folder, os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=folder)
                    os.close(above)
                os.stat(parts[-1], dir_fd=folder, follow_symlinks=False)
                walk(folder, parts[-1], "/" + "/".join(parts))
            except FileNotFoundError:
                refused.append([path, "not there"])
            except OSError as error:
                refused.append([path, f"below a link or no folder: {error.strerror}"])
            finally:
                os.close(folder)
        return {"taken": taken, "refused": refused}, bytes(data)


def _candidates(program: str, path: str) -> list[str]:
    """Where a program may be. os.execvpe does the same and imports a module in every child."""
    return [program] if "/" in program else [f"{folder}/{program}" for folder in path.split(":")]


def _pids() -> set[int]:
    """All processes of the box but this one."""
    return {int(name) for name in os.listdir("/proc") if name.isdigit()} - {1}


def _zombie(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] == b"Z"
    except OSError:
        return True


def _resident(pid: int) -> int:
    """Bytes of memory that a process holds, files apart."""
    try:
        with open(f"/proc/{pid}/status", "rb") as file:
            fields = dict(line.split(b":", 1) for line in file if line.startswith((b"RssAnon", b"RssShmem")))
    except OSError:
        return 0
    return sum(int(value.split()[0]) << 10 for value in fields.values())


def _kill_all() -> None:
    try:
        os.kill(-1, signal.SIGKILL)  # all but this one, at one stroke
    except ProcessLookupError:
        pass


def _await(ended: Callable[[], bool]) -> bool:
    """Reaps until what was killed has ended; whether it did in time."""
    end = time.monotonic() + _KILL_LIMIT
    while not ended():
        if time.monotonic() > end:
            return False
        _reap()
        time.sleep(0.001)
    return True


def _reap(but: int = -1) -> None:
    """Takes leave of orphans that have ended, as init has to, until `but` is the next to have ended."""
    try:
        while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) and ended.si_pid != but:
            os.waitpid(ended.si_pid, 0)
    except ChildProcessError:
        pass


def _send(channel: socket.socket, header: dict, payload: bytes = b"") -> None:
    text = repr(header).encode()
    channel.sendall(struct.pack(">II", len(text), len(payload)) + text + payload)


def _receive(channel: socket.socket) -> tuple[dict, bytes]:
    sizes = struct.unpack(">II", _exactly(channel, 8))
    text, payload = (_exactly(channel, size) for size in sizes)
    return eval(text, {}), payload


def _exactly(channel: socket.socket, size: int) -> bytes:
    """`size` bytes; the box ends where the host has gone."""
    data = bytearray()
    while len(data) < size:
        piece = channel.recv(min(size - len(data), 1 << 20))
        if not piece:
            os._exit(0)
        data += piece
    return bytes(data)


if __name__ == "__main__":
    try:
        main(int(sys.argv[1]), eval(sys.argv[2], {}))
    except ConnectionError:
        os._exit(0)
