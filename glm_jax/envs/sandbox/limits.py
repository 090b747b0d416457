"""What a box may use, and what a command in it came to."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True)
class Limits:
    """Bounds of one box."""

    memory_mb: int = 1024  # of all processes together; where a cgroup counts, what they write to files as well
    disk_mb: int = 128  # of each writable folder, /tmp and /dev/shm among them; they lie in memory
    processes: int = 256  # threads included
    output_bytes: int = 16384  # of each stream of a command that are kept, half from the head, half from the tail
    open_files: int = 1024

    def __post_init__(self) -> None:
        for field in fields(self):
            if (value := getattr(self, field.name)) < 1:
                raise ValueError(f"{field.name} is {value}; a box wants at least 1")


@dataclass(frozen=True)
class Output:
    """What a command wrote to a stream: `head` and `tail` of `total` bytes. With nothing left out, all is in head."""

    head: bytes
    tail: bytes
    total: int

    @property
    def left_out(self) -> int:
        return self.total - len(self.head) - len(self.tail)

    def __str__(self) -> str:
        """As text; bytes that are not UTF-8 as \\xNN."""
        if not self.left_out:
            return (self.head + self.tail).decode(errors="backslashreplace")
        head, tail = (part.decode(errors="backslashreplace") for part in (self.head, self.tail))
        return f"{head}\n[... {self.left_out} of {self.total} bytes left out ...]\n{tail}"


@dataclass(frozen=True)
class Result:
    """A command that ran. Where it ran over its time or memory it was killed with everything that it started."""

    code: int  # exit status; 128 + n where signal n ended it; 127 where there is no such program
    out: Output
    err: Output
    timed_out: bool
    out_of_memory: bool
    seconds: float

    @property
    def ok(self) -> bool:
        return self.code == 0 and not self.timed_out
