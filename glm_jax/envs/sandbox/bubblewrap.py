"""The command line of bubblewrap for a box: what it sees, what it may write, what it is cut off from."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path, PurePosixPath

from glm_jax.envs.sandbox.errors import SandboxUnavailable

SUPERVISOR = "/opt/glm_jax/supervisor.pyc"
_OF_ETC = (
    "ld.so.cache",
    "ld.so.conf",
    "ld.so.conf.d",
    "alternatives",
    "localtime",
    "nsswitch.conf",
    "hosts",
    "valgrind",
)
_MERGED = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")  # links into /usr, on most systems
_DROPPED_LATER = ("CAP_SETUID", "CAP_SETGID", "CAP_SETPCAP")  # by the supervisor, before its first command
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def program() -> str:
    """The path of bubblewrap. Raises SandboxUnavailable where there is none."""
    if (path := shutil.which("bwrap", path=f"{os.environ.get('PATH', '')}:{PATH}")) is None:
        raise SandboxUnavailable("bubblewrap is missing: apt-get install bubblewrap (or dnf, pacman, apk)")
    return path


def namespaces(root: bool, nesting: bool) -> list[str]:
    """Flags that cut a box off. `root`: its supervisor gives up what root keeps; `nesting`: boxes may start within."""
    flags = ["--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try"]
    flags += [
        "--die-with-parent",
        "--new-session",
        "--clearenv",
        "--hostname",
        "box",
        "--cap-drop",
        "ALL",
    ]
    if root:
        kept = (*_DROPPED_LATER, "CAP_SYS_ADMIN") if nesting else _DROPPED_LATER
        return flags + [word for capability in kept for word in ("--cap-add", capability)]
    return [*flags, "--unshare-user", *([] if nesting else ["--disable-userns"])]


def system() -> list[str]:
    """The read-only system: /usr, this Python with its packages, and the little of /etc that programs want."""
    mounts = ["--ro-bind", "/usr", "/usr"]
    for name in _MERGED:
        here = Path("/", name)
        if here.is_symlink():
            mounts += ["--symlink", os.readlink(here), str(here)]
        elif here.is_dir():
            mounts += ["--ro-bind", str(here), str(here)]
    mounts += ["--perms", "0755", "--dir", "/etc"]
    for name in _OF_ETC:
        mounts += ["--ro-bind-try", f"/etc/{name}", f"/etc/{name}"]
    return mounts


def python() -> list[str]:
    """This interpreter and the packages below its own prefix, where they are on the host; other paths are not there."""
    mounts: list[str] = []
    for place in dict.fromkeys((sys.base_prefix, os.path.realpath(sys.base_prefix), sys.prefix)):
        if PurePosixPath(place).is_relative_to("/usr"):
            continue
        for parent in reversed(PurePosixPath(place).parents[:-1]):
            mounts += ["--perms", "0755", "--dir", str(parent)]
        mounts += ["--ro-bind", place, place]
    return mounts


def writable(folders: tuple[str, ...], disk_mb: int) -> list[str]:
    """Folders in memory, each with its own cap, /tmp and /dev/shm among them; all else is read-only."""
    size = str(disk_mb << 20)
    mounts = ["--proc", "/proc", "--dev", "/dev"]
    for folder in ("/tmp", "/dev/shm", *folders):
        mounts += ["--perms", "1777", "--size", size, "--tmpfs", folder]
    return mounts


def sealed() -> list[str]:
    """What ends a list of mounts: the root itself, which lies in memory without a cap, becomes read-only."""
    return ["--remount-ro", "/dev", "--remount-ro", "/"]
