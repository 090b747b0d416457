"""Cloud TPU queued resources: a script that asks for them, starts every worker over ssh, and asks again if they go."""

from __future__ import annotations

import shlex

from launch.job import RETRIED, Job, worker
from launch.topology import LaunchError

POLL = 60  # seconds between two looks at a request


def script(job: Job, zone: str, project: str, prelude: str = "", spot: bool = False, wait: int = 86400) -> str:
    """The script, to be kept running on a machine that has gcloud.

    prelude: a line of shell for every host, such as `source /mnt/runs/venv/bin/activate`. wait: seconds that a request
    may stand in the queue. The resources are deleted when the program has ended, well or with an error of its own.
    Raises LaunchError.
    """
    family = job.topology.of
    if family.runtime is None:
        raise LaunchError(f"--topology={job.topology}: {job.topology.family} has no queued resources; use gke")
    where = shlex.join([f"--zone={zone}", f"--project={project}"])
    create = [f"--accelerator-type={job.topology.accelerator_type}", f"--runtime-version={family.runtime}"]
    several = [f"--node-count={job.slices}", f"--node-prefix={job.name}"]
    create += several if job.slices > 1 else [f"--node-id={job.name}"]
    create += ["--spot"] if spot else []
    node = f"{job.name}-$slice" if job.slices > 1 else job.name
    remote = "\n".join(["set -eu", *([prelude] if prelude else []), worker(job, "$first", "$slice", "$process")])
    return f"""\
#!/bin/bash
set -euo pipefail

request() {{ gcloud compute tpus queued-resources "$1" {job.name} {where} "${{@:2}}"; }}

# Starts every process and waits for all; the code of the last one that failed.
run() {{
    local first code=0 pids=()
    first=$(gcloud compute tpus tpu-vm describe {job.name}{"-0" if job.slices > 1 else ""} {where} \\
        --format='value(networkEndpoints[0].ipAddress)')
    for ((slice = 0; slice < {job.slices}; slice++)); do
        for ((process = 0; process < {job.topology.hosts}; process++)); do
            gcloud compute tpus tpu-vm ssh "{node}" {where} --worker="$process" \\
                --command="first=$first slice=$slice process=$process"$'\\n'{shlex.quote(remote)} </dev/null &
            pids+=("$!")
        done
    done
    for pid in "${{pids[@]}}"; do wait "$pid" || code=$?; done
    return "$code"
}}

starts=0
waited=0
while :; do
    state=$(request describe --format='value(state.state)' || echo ABSENT)
    case "$state" in
    ABSENT)
        waited=0
        request create {shlex.join(create)}
        ;;
    ACTIVE)
        code=0
        run || code=$?
        case "$code" in
        {" | ".join(map(str, (*RETRIED, 255)))}) # 255: ssh lost the host
            starts=$((starts + 1))
            if [ "$starts" -gt {job.retries} ]; then
                echo "{job.name}: started again {job.retries} times, which is all that --retries allows" >&2
                exit "$code"
            fi
            sleep {POLL} # until a request that was taken away says so
            ;;
        *)
            request delete --force --quiet
            exit "$code"
            ;;
        esac
        ;;
    SUSPENDED) request delete --force --quiet ;; # taken away: asked for anew
    FAILED)
        request describe --format='value(state)' >&2
        exit 1
        ;;
    *)
        if [ "$waited" -ge {wait} ]; then
            echo "{job.name}: $state after {wait} s in the queue; --wait sets how long" >&2
            exit 1
        fi
        waited=$((waited + {POLL}))
        sleep {POLL}
        ;;
    esac
done
"""
