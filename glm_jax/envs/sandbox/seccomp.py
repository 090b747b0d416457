"""A seccomp filter as BPF, assembled by hand: what no command in a box has a use for, and what reaches other systems.

The filter answers EPERM for calls that trace, mount, make namespaces or load code into the kernel, EAFNOSUPPORT for
socket families other than unix, inet, inet6 and netlink (AF_VSOCK would reach a virtual machine's host past the network
namespace), and ENOSYS for clone3, whose flags lie in memory that a filter cannot read (libc then calls clone).
Numbers from the kernel's asm/unistd.h; seccomp(2) for the layout of what a filter sees.
"""

from __future__ import annotations

import errno
import platform
import struct
from dataclasses import dataclass

from glm_jax.envs.sandbox.errors import SandboxUnavailable

# bpf_common.h
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_NUMBER, _ARCH, _ARGUMENTS = 0, 4, 16  # offsets in struct seccomp_data
_X32 = 0x40000000  # the bit of the x32 ABI, which has numbers of its own
_NEW_NAMESPACE = 0x7E020080  # CLONE_NEW{TIME,CGROUP,UTS,IPC,USER,PID,NET,NS}
_FAMILIES = (1, 2, 10, 16)  # AF_UNIX, AF_INET, AF_INET6, AF_NETLINK
_PRIO_PROCESS, _IOPRIO_WHO_PROCESS = 0, 1
_TIOCSTI, _TIOCLINUX = 0x5412, 0x541C  # ioctls that type into a terminal


@dataclass(frozen=True)
class _Numbers:
    audit: int
    nesting: tuple[int, ...]  # what a box inside this one needs
    denied: tuple[int, ...]
    memory: tuple[int, ...]  # memory that belongs to no process: a watchdog cannot see it
    clone: int
    clone3: int
    socket: int
    own: tuple[int, ...]  # about a process, 0 being the caller: prlimit, sched_set{affinity,scheduler,param,attr}
    priorities: tuple[int, int]  # setpriority, ioprio_set
    ioctl: int


# The order of `denied`: ptrace, process_vm_readv, process_vm_writev, kcmp, perf_event_open, bpf, userfaultfd, add_key,
# request_key, keyctl, kexec_load, kexec_file_load, init_module, finit_module, delete_module, reboot, swapon, swapoff,
# acct, quotactl, syslog, open_by_handle_at, personality, io_uring_setup, io_uring_enter, io_uring_register,
# pidfd_getfd, process_madvise. Of `nesting`: unshare, setns, mount, umount2, pivot_root, chroot, then open_tree,
# move_mount, fsopen, fsconfig, fsmount, fspick, mount_setattr. Of `memory`: memfd_create, shmget, memfd_secret.
_COMMON_NESTING = (428, 429, 430, 431, 432, 433, 442)
_X86_64 = _Numbers(
    audit=0xC000003E,
    nesting=(272, 308, 165, 166, 155, 161, *_COMMON_NESTING),
    denied=(
        *(101, 310, 311, 312, 298, 321, 323, 248, 249, 250, 246, 320, 175, 313, 176, 169, 167, 168),
        *(163, 179, 103, 304, 135, 425, 426, 427, 438, 440),
    ),
    memory=(319, 29, 447),
    clone=56,
    clone3=435,
    socket=41,
    own=(302, 203, 144, 142, 314),
    priorities=(141, 251),
    ioctl=16,
)
_AARCH64 = _Numbers(
    audit=0xC00000B7,
    nesting=(97, 268, 40, 39, 41, 51, *_COMMON_NESTING),
    denied=(
        *(117, 270, 271, 272, 241, 280, 282, 217, 218, 219, 104, 294, 105, 273, 106, 142, 224, 225),
        *(89, 60, 116, 265, 92, 425, 426, 427, 438, 440),
    ),
    memory=(279, 194, 447),
    clone=220,
    clone3=435,
    socket=198,
    own=(261, 122, 119, 118, 274),
    priorities=(140, 30),
    ioctl=29,
)
_MACHINES = {"x86_64": _X86_64, "aarch64": _AARCH64}


def program(nesting: bool, watched: bool) -> bytes:
    """The filter. `nesting` leaves what a box within needs; `watched` denies memory that no process shows."""
    if (numbers := _MACHINES.get(platform.machine())) is None:
        raise SandboxUnavailable(
            f"no system call filter is known for {platform.machine()}; boxes run on {' and '.join(_MACHINES)}"
        )
    denied = numbers.denied + (() if nesting else numbers.nesting) + (numbers.memory if watched else ())
    code = [
        _op(_LOAD, _ARCH),
        _op(_EQUAL, numbers.audit, 1, 0),
        _fail(errno.ENOSYS),
        _op(_LOAD, _NUMBER),
        _op(_AT_LEAST, _X32, 0, 1),
        _fail(errno.ENOSYS),
    ]
    for number in denied:
        code += [_op(_EQUAL, number, 0, 1), _fail(errno.EPERM)]
    if not nesting:
        code += [_op(_EQUAL, numbers.clone3, 0, 1), _fail(errno.ENOSYS)]
        code += _where(numbers.clone, 0, [_op(_ANY_BIT, _NEW_NAMESPACE, 0, 1), _fail(errno.EPERM)])
    families = [_op(_EQUAL, family, len(_FAMILIES) - i, 0) for i, family in enumerate(_FAMILIES)]
    code += _where(numbers.socket, 0, [*families, _fail(errno.EAFNOSUPPORT)])
    # Another process's limits and turns: a command could starve its supervisor, which has the same uid.
    only = lambda value: [_op(_EQUAL, value, 1, 0), _fail(errno.EPERM)]
    for number in numbers.own:
        code += _where(number, 0, only(0))
    for number, of_a_process in zip(numbers.priorities, (_PRIO_PROCESS, _IOPRIO_WHO_PROCESS), strict=True):
        code += _where(number, 0, only(of_a_process)) + _where(number, 1, only(0))
    typing = [op for request in (_TIOCSTI, _TIOCLINUX) for op in (_op(_EQUAL, request, 0, 1), _fail(errno.EPERM))]
    code += _where(numbers.ioctl, 1, typing)
    return b"".join([*code, _op(_RETURN, _ALLOW)])


def _op(code: int, value: int, then: int = 0, otherwise: int = 0) -> bytes:
    """One instruction; `then` and `otherwise` are numbers of instructions to skip."""
    return struct.pack("=HBBI", code, then, otherwise, value)


def _fail(number: int) -> bytes:
    return _op(_RETURN, _ERRNO | number)


def _where(number: int, argument: int, code: list[bytes]) -> list[bytes]:
    """`code` on the low half of an argument of one call; the call's number is loaded again after it."""
    body = [_op(_LOAD, _ARGUMENTS + 8 * argument), *code, _op(_LOAD, _NUMBER)]
    return [_op(_EQUAL, number, 0, len(body)), *body]
