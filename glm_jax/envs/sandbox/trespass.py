"""Runs in a box and tries what no command there may be able to do; prints JSON of what it saw and what succeeded.

`python -I -S -c TEXT PORT ABSTRACT SENTINEL HIDDEN...`: a listener's port on the host's loopback, an abstract socket of
the host, the process id of a program named glm-jax-sentinel there, and paths that only the host has.
"""

import ctypes
import json
import os
import socket
import sys
import time

NEW_USER = 0x10000000  # CLONE_NEWUSER
VSOCK = 40
libc = ctypes.CDLL(None)


def works(call, *arguments):
    try:
        call(*arguments)
        return True
    except OSError:
        return False


def allowed(call, *arguments):
    """Whether a system call succeeds, in a process of its own, which it may change."""
    if (pid := os.fork()) == 0:
        os._exit(call(*arguments) != 0)
    return os.waitpid(pid, 0)[1] == 0


def connect(family, address):
    with socket.socket(family, socket.SOCK_STREAM) as stream:
        stream.settimeout(2)
        stream.connect(address)


def create(folder):
    with open(f"{folder}/glm-jax-probe", "x"):
        pass


def fill():
    with open("/app/full", "wb") as file:
        for _ in range(9):
            file.write(bytes(1 << 20))
            file.flush()


def named(pid):
    with open(f"/proc/{pid}/cmdline") as file:
        return "glm-jax-sentinel" in file.read()


def forks(most):
    for made in range(most):
        try:
            pid = os.fork()
        except OSError:
            return made
        if pid == 0:
            time.sleep(5)
            os._exit(0)
    return most


port, abstract, sentinel, *hidden = sys.argv[1:]
with open("/proc/self/status") as file:
    status = dict(line.split(":", 1) for line in file)
addresses = {
    "loopback": (socket.AF_INET, ("127.0.0.1", int(port))),
    "abstract socket": (socket.AF_UNIX, chr(0) + abstract),
    "1.1.1.1": (socket.AF_INET, ("1.1.1.1", 53)),
}
folders = ("/", "/usr", "/etc", "/dev", "/opt/glm_jax", os.path.dirname(sys.executable))
seen = {
    "uid": os.getuid(),
    "capabilities": [name for name in ("CapPrm", "CapEff", "CapBnd", "CapAmb") if int(status[name], 16)],
    "no_new_privs": status["NoNewPrivs"].strip() == "1",
    "reached": [name for name, address in addresses.items() if works(connect, *address)]
    + [name for _, name in socket.if_nameindex() if name != "lo"]
    + (["AF_VSOCK"] if works(lambda: socket.socket(VSOCK, socket.SOCK_STREAM).close()) else []),
    "wrote": [folder for folder in folders if works(create, folder)],
    "hidden": [path for path in hidden if os.path.exists(path)],
    "processes": sorted(int(name) for name in os.listdir("/proc") if name.isdigit()),
    "host_process": os.path.exists(f"/proc/{sentinel}") and named(sentinel),
    "supervisor": works(os.listdir, "/proc/1/fd"),
    "traced": allowed(libc.ptrace, 0, 0, 0, 0),
    "namespace": allowed(libc.unshare, NEW_USER),
    "disk": works(fill),
    "forks": forks(64),
}
print(json.dumps(seen), flush=True)
os.kill(-1, 9)
