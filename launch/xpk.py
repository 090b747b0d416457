"""xpk: the command that makes the JobSet itself, from the same shell."""

from __future__ import annotations

from launch.job import RETRIED, Job, worker
from launch.topology import LaunchError


def command(job: Job, image: str, cluster: str, storage: str, zone: str, project: str, spot: bool = False) -> list[str]:
    """`xpk workload create ...`. storage: an attached storage of xpk, in which the workdir lies. Raises LaunchError."""
    family = job.topology.of
    if not family.tpu:
        raise LaunchError(f"--topology={job.topology}: xpk is for TPUs here; `gke` and `slurm` submit to GPUs")
    # xpk's child jobs are called slice-job; GKE numbers slices where there are several.
    slice = "$MEGASCALE_SLICE_ID" if job.slices > 1 else "0"
    shell = worker(job, f"{job.name}-slice-job-0-0.{job.name}", slice, "$JOB_COMPLETION_INDEX")
    words = ["xpk", "workload", "create", f"--workload={job.name}", f"--cluster={cluster}"]
    words += [f"--project={project}", f"--zone={zone}", f"--tpu-type={job.topology.accelerator_type}"]
    words += [f"--num-slices={job.slices}", f"--docker-image={image}", f"--storage={storage}"]
    words += [f"--max-restarts={job.retries}", f"--restart-on-exit-codes={','.join(map(str, RETRIED))}"]
    words += [f"--termination-grace-period-seconds={job.grace}", *(["--spot"] if spot else [])]
    return [*words, "--command", f"set -eu\n{shell}"]
