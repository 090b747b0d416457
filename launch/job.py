"""A job: what is to run where, and the few lines of shell by which each of its processes starts."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass

from launch.topology import LaunchError, Topology

# Exit codes after which a job is started again: 75 is glm-jax's own after SIGTERM or where another process is lost, 134
# jax's where process 0 is, the others are of processes that SIGKILL or SIGTERM ended before they could answer. Any
# other code is an error that would come again.
RETRIED = (75, 134, 137, 143)
PORT = 8476  # of jax.distributed's coordinator
CONFIG, WORKDIR, DATA = "--config", "--workdir", "--config.mesh.data"


@dataclass(frozen=True)
class Job:
    """`train` is what follows `glm-jax train`."""

    name: str
    topology: Topology
    slices: int
    train: tuple[str, ...]
    retries: int  # starts after the first
    grace: int  # seconds between SIGTERM and SIGKILL

    @property
    def processes(self) -> int:
        """One per host."""
        return self.slices * self.topology.hosts

    @property
    def workdir(self) -> str:
        return _value(self.train, WORKDIR)

    @property
    def command(self) -> str:
        return shlex.join(["glm-jax", "train", *self.train])


def make_job(name: str, topology: Topology, slices: int, train: list[str], retries: int, grace: int) -> Job:
    """A job whose parts agree; several slices are joined along the mesh's `data` axis alone.

    Raises LaunchError.
    """
    if not re.fullmatch(r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?", name):
        raise LaunchError(f"--name={name}: up to 40 of a-z, 0-9 and -, the first a letter, the last no -")
    if missing := [flag for flag in (CONFIG, WORKDIR) if _value(train, flag) is None]:
        raise LaunchError(f"{' and '.join(missing)} missing after --, where the flags of `glm-jax train` stand")
    if slices < 1 or retries < 0 or grace < 1:
        raise LaunchError(f"--slices={slices} --retries={retries} --grace={grace}: at least 1, 0 and 1")
    if slices > 1 and not topology.of.tpu:
        raise LaunchError(f"--slices={slices}: slices are of TPUs; take more hosts of {topology.family} instead")
    if slices > 1:
        data = _value(train, DATA)
        if data is None:
            train = [*train, f"{DATA}={slices}"]
        elif not data.isdigit() or int(data) == 0 or int(data) % slices:
            raise LaunchError(
                f"{DATA}={data}: only the data axis may cross the network between slices, so it has to be a multiple "
                f"of --slices={slices}"
            )
    return Job(name, topology, slices, tuple(train), retries, grace)


def worker(job: Job, coordinator: str, slice: str, process: str) -> str:
    """The shell of one process. The arguments are host, slice number and process number within it, as shell words.

    Processes are numbered slice by slice, so that devices of a slice are neighbours in jax.devices() and the mesh's
    outermost axis is the one that crosses slices. `exec` lets the scheduler's SIGTERM reach the program.
    """
    lines = [
        f'export JAX_COORDINATOR_ADDRESS="{coordinator}:{PORT}"',
        f"export JAX_NUM_PROCESSES={job.processes}",
        f"export JAX_PROCESS_ID=$(({slice} * {job.topology.hosts} + {process}))",
    ]
    if job.slices > 1:
        lines += [
            f'export MEGASCALE_COORDINATOR_ADDRESS="{coordinator}"',
            f"export MEGASCALE_NUM_SLICES={job.slices}",
            f'export MEGASCALE_SLICE_ID="{slice}"',
        ]
    return "\n".join([*lines, f"exec {job.command}"])


def _value(flags: list[str] | tuple[str, ...], name: str) -> str | None:
    """The value of `--name=value` or `--name value`, the last where there are several."""
    found = None
    for flag, following in zip(flags, [*flags[1:], None], strict=True):
        if flag == name:
            found = following
        elif flag.startswith(f"{name}="):
            found = flag.partition("=")[2]
    return found
