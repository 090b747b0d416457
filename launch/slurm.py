"""SLURM: a batch script, one task per host, which requeues itself."""

from __future__ import annotations

import shlex

from launch.job import PORT, RETRIED, Job
from launch.topology import LaunchError


def script(job: Job, prelude: str = "", options: tuple[str, ...] = ()) -> str:
    """The script for sbatch.

    prelude: a line of shell for every host, such as `source /shared/venv/bin/activate`. options: of the site, such as
    `--partition=gpu`. Slurm sends SIGTERM job.grace seconds before the time limit; the script requeues the job on the
    codes that are retried, up to job.retries times. Raises LaunchError.
    """
    if job.topology.of.tpu:
        raise LaunchError(
            f"--topology={job.topology}: SLURM is for GPUs here; `queued`, `gke` and `xpk` submit to TPUs"
        )
    header = {
        "job-name": job.name,
        "nodes": job.topology.hosts,
        "ntasks-per-node": 1,
        "gpus-per-node": job.topology.of.per_host,
        "signal": f"TERM@{job.grace}",
        "open-mode": "append",
        "output": f"{job.name}-%j.log",
    }
    lines = ["#!/bin/bash", *(f"#SBATCH --{key}={value}" for key, value in header.items())]
    lines += ["#SBATCH --exclusive", "#SBATCH --requeue", *(f"#SBATCH {option}" for option in options)]
    process = "\n".join([*([prelude] if prelude else []), "export JAX_PROCESS_ID=$SLURM_PROCID", f"exec {job.command}"])
    return "\n".join(
        [
            *lines,
            "set -eu",
            "trap : TERM  # the steps answer to it, and this shell waits for their codes",
            'first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
            f'export JAX_COORDINATOR_ADDRESS="$first:{PORT}"',
            f"export JAX_NUM_PROCESSES={job.processes}",
            "code=0",
            f"srun --kill-on-bad-exit=1 bash -c {shlex.quote(process)} || code=$?",
            'case "$code" in',
            f"{' | '.join(map(str, RETRIED))})",
            f'    if [ "${{SLURM_RESTART_COUNT:-0}}" -lt {job.retries} ]; then scontrol requeue "$SLURM_JOB_ID"; fi',
            "    ;;",
            "esac",
            'exit "$code"',
            "",
        ]
    )
