"""Parts of the sandbox that need no box: the filter of system calls, control groups, user ids, output, errors."""

from __future__ import annotations

import errno
import platform
import struct
import subprocess
import sys

import pytest

from glm_jax.envs.sandbox import bubblewrap, seccomp
from glm_jax.envs.sandbox.cgroup import Leaf
from glm_jax.envs.sandbox.errors import SandboxUnavailable
from glm_jax.envs.sandbox.limits import Limits, Output
from glm_jax.envs.sandbox.uids import COUNT, FIRST, Lease

ALLOW = 0x7FFF0000
X86_64, AARCH64 = 0xC000003E, 0xC00000B7


def verdict(code: bytes, arch: int, number: int, *arguments: int) -> str:
    """What the kernel's machine for these programs answers: the instructions as in bpf(4), on struct seccomp_data."""
    data = struct.pack("=IIQ6Q", number, arch, 0, *(list(arguments) + [0] * 6)[:6])
    at = accumulator = 0
    for _ in range(1000):
        op, then, otherwise, value = struct.unpack_from("=HBBI", code, 8 * at)
        at += 1
        if op == 0x20:  # LD W ABS
            (accumulator,) = struct.unpack_from("=I", data, value)
        elif op == 0x06:  # RET
            return "allow" if value == ALLOW else errno.errorcode[value & 0xFFFF]
        else:
            holds = {0x15: accumulator == value, 0x35: accumulator >= value, 0x45: bool(accumulator & value)}[op]
            at += then if holds else otherwise
    raise AssertionError("the program does not end")


# (call on x86_64, call on aarch64, arguments, verdict in a box, verdict in a grader's box, verdict in a watched box)
CALLS = {
    "read": (0, 63, (), "allow", "allow", "allow"),
    "execve": (59, 221, (), "allow", "allow", "allow"),
    "ptrace": (101, 117, (), "EPERM", "EPERM", "EPERM"),
    "keyctl": (250, 219, (), "EPERM", "EPERM", "EPERM"),
    "io_uring_setup": (425, 425, (), "EPERM", "EPERM", "EPERM"),
    "unshare": (272, 97, (), "EPERM", "allow", "EPERM"),
    "mount": (165, 40, (), "EPERM", "allow", "EPERM"),
    "clone for a thread": (56, 220, (0x3D0F00,), "allow", "allow", "allow"),
    "clone for a user namespace": (56, 220, (0x10000011,), "EPERM", "allow", "EPERM"),
    "clone3": (435, 435, (), "ENOSYS", "allow", "ENOSYS"),
    "inet socket": (41, 198, (2,), "allow", "allow", "allow"),
    "netlink socket": (41, 198, (16,), "allow", "allow", "allow"),
    "vsock": (41, 198, (40,), "EAFNOSUPPORT", "EAFNOSUPPORT", "EAFNOSUPPORT"),
    "own limits": (302, 261, (0,), "allow", "allow", "allow"),
    "init's limits": (302, 261, (1,), "EPERM", "EPERM", "EPERM"),
    "own turn": (203, 122, (0,), "allow", "allow", "allow"),
    "init's turn": (144, 119, (1,), "EPERM", "EPERM", "EPERM"),
    "own priority": (141, 140, (0, 0), "allow", "allow", "allow"),
    "init's priority": (141, 140, (0, 1), "EPERM", "EPERM", "EPERM"),
    "a user's priority": (141, 140, (2, 0), "EPERM", "EPERM", "EPERM"),
    "own priority of input": (251, 30, (1, 0), "allow", "allow", "allow"),
    "init's priority of input": (251, 30, (1, 1), "EPERM", "EPERM", "EPERM"),
    "an ordinary ioctl": (16, 29, (0, 0x5401), "allow", "allow", "allow"),
    "typing into a terminal": (16, 29, (0, 0x5412), "EPERM", "EPERM", "EPERM"),
    "memfd_create": (319, 279, (), "allow", "allow", "EPERM"),
}


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_the_filter_answers_each_call_as_it_should(monkeypatch, machine: str):
    monkeypatch.setattr(platform, "machine", lambda: machine)
    arch, column = {"x86_64": (X86_64, 0), "aarch64": (AARCH64, 1)}[machine]
    programs = [seccomp.program(*kind) for kind in ((False, False), (True, False), (False, True))]
    for name, (*numbers, arguments, plain, grader, watched) in CALLS.items():
        got = [verdict(code, arch, numbers[column], *arguments) for code in programs]
        assert got == [plain, grader, watched], name


def test_the_filter_answers_no_foreign_abi(monkeypatch):
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    code = seccomp.program(nesting=False, watched=False)
    assert verdict(code, 0x40000003, 11) == "ENOSYS"  # i386
    assert verdict(code, X86_64, 0x40000000 | 59) == "ENOSYS"  # x32


def test_an_unknown_machine_has_no_boxes(monkeypatch):
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    with pytest.raises(SandboxUnavailable, match="no system call filter is known for riscv64"):
        seccomp.program(nesting=False, watched=False)


def test_without_bubblewrap_the_error_names_the_remedy(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(bubblewrap, "PATH", str(tmp_path))
    with pytest.raises(SandboxUnavailable, match="bubblewrap is missing: apt-get install bubblewrap"):
        bubblewrap.program()


def test_a_control_group_of_either_version_gets_both_limits(tmp_path, monkeypatch):
    def parents(version: int) -> tuple:
        """Folders whose new subfolders hold the files of a controller, as the kernel makes them."""
        files = {1: [("memory.limit_in_bytes",), ("pids.max",)], 2: [("memory.max", "memory.swap.max", "pids.max")]}
        found = []
        for number, names in enumerate(files[version]):
            folder = tmp_path / f"v{version}-{number}"
            folder.mkdir()
            found.append((folder, names))
        real = type(tmp_path).mkdir

        def mkdir(self, *args, **kwargs):
            real(self, *args, **kwargs)
            for folder, names in found:
                if self.parent == folder:
                    for name in (*names, "cgroup.procs"):
                        (self / name).write_text("")

        monkeypatch.setattr(type(tmp_path), "mkdir", mkdir)
        return tuple(folder for folder, _ in found)

    for version, memory in ((1, "memory.limit_in_bytes"), (2, "memory.max")):
        folders = parents(version)
        leaf = Leaf.new(memory_mb=3, processes=7, parents=folders)
        made = [next(folder.glob("glm-jax-*")) for folder in folders]
        assert (made[0] / memory).read_text() == str(3 << 20) and (made[-1] / "pids.max").read_text() == "7"
        assert leaf is not None and len(leaf.doors()) == len(folders)
        (made[0] / "memory.events").write_text("oom 3\noom_kill 2\n")
        assert leaf.kills() == 2


def test_where_no_control_group_may_be_made_there_is_none(tmp_path):
    assert Leaf.new(memory_mb=3, processes=7, parents=(tmp_path / "none",)) is None
    (tmp_path / "plain").mkdir()
    assert Leaf.new(memory_mb=3, processes=7, parents=(tmp_path / "plain",)) is None  # no controller there
    assert list((tmp_path / "plain").iterdir()) == []


@pytest.mark.skipif("sys.platform != 'linux' or __import__('os').geteuid() != 0", reason="leases are root's")
def test_no_two_boxes_lease_one_user_id(monkeypatch):
    """Of three ids, three leases get each once and a fourth none; those of a process that ended are free again."""
    import glm_jax.envs.sandbox.uids as uids

    monkeypatch.setattr(uids, "COUNT", 3)
    leases = [Lease() for _ in range(3)]
    assert len({lease.uid for lease in leases}) == 3 and all(FIRST <= lease.uid < FIRST + COUNT for lease in leases)
    with pytest.raises(SandboxUnavailable, match="all in use"):
        Lease()
    code = (
        "import glm_jax.envs.sandbox.uids as u; u.COUNT = 3\ntry:\n    u.Lease()\nexcept Exception as e:\n    print(e)"
    )
    assert "all in use" in subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout
    for lease in leases:
        lease.close()
    Lease().close()


def test_limits_that_make_no_sense_are_named():
    with pytest.raises(ValueError, match="memory_mb is 0; a box wants at least 1"):
        Limits(memory_mb=0)


def test_output_says_how_much_is_left_out():
    assert str(Output(b"ab", b"", 2)) == "ab"
    assert str(Output(b"ab", b"yz", 100)) == "ab\n[... 96 of 100 bytes left out ...]\nyz"
