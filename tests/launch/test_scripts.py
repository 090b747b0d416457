"""What the scripts do, beside commands that stand in for gcloud, srun, scontrol and glm-jax and note their calls."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.launch.test_manifests import GKE, QUEUED, SLURM, made

# Tells how it was started, and leaves with the next code that it is given (none: 0).
PROGRAM = """
echo "$JAX_COORDINATOR_ADDRESS $JAX_PROCESS_ID/$JAX_NUM_PROCESSES slice ${MEGASCALE_SLICE_ID:--} $*" >> "$LOG"
read -r code rest < "$CODES" || code=0
[ "${JAX_PROCESS_ID}" != 0 ] || echo "$rest" > "$CODES"
exit "${code:-0}"
"""
STANDINS = {
    "glm-jax": PROGRAM,
    "sleep": "",
    "scontrol": 'if [ "$1" = show ]; then printf "first\\nsecond\\n"; else echo "scontrol $*" >> "$LOG"; fi',
    # Two tasks, one after the other; the highest code.
    "srun": """
shift; worst=0
for SLURM_PROCID in 1 0; do export SLURM_PROCID; code=0; "$@" || code=$?; [ $code -le $worst ] || worst=$code; done
exit $worst""",
    # States come one by one from a file; a worker's command runs here.
    "gcloud": """
case "$3 $4" in
"queued-resources describe") read -r state rest < "$STATES" || true; echo "$rest" > "$STATES"
    [ "$state" != ABSENT ] || exit 1; echo "$state" ;;
"queued-resources "*) echo "$4 ${*:8}" >> "$LOG" ;;
"tpu-vm describe") echo 10.0.0.1 ;;
"tpu-vm ssh") echo "ssh $5 $8" >> "$LOG"; command="${9#--command=}"; exec bash -c "$command" ;;
esac""",
}


@pytest.fixture
def run(tmp_path):
    """Runs a script beside the stand-ins: (script, exit codes of the program, states of the request) -> code, log."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, text in STANDINS.items():
        (folder / name).write_text(f"#!/bin/bash\n{text}\n")
        (folder / name).chmod(0o755)

    def call(script: str, codes: str = "", states: str = "", **environment: str):
        files = {name: tmp_path / name for name in ("LOG", "CODES", "STATES")}
        for file, text in zip(files.values(), ("", codes, states), strict=True):
            file.write_text(text + "\n" if text else "")
        path = f"{folder}:{os.environ['PATH']}"
        env = {"PATH": path, "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]", **environment}
        env |= {name: str(file) for name, file in files.items()}
        done = subprocess.run(["bash", "-s"], input=script, env=env, capture_output=True, text=True, timeout=60)
        return done.returncode, Path(files["LOG"]).read_text().splitlines(), done.stderr

    return call


FLAGS = "train --config experiments/configs/demo.py --workdir /runs/it's demo"


def test_a_pod_of_the_second_slice_knows_its_number(run):
    manifest = yaml.safe_load(made([*GKE, "--topology=v6e:4x4", "--slices=2"]).text)
    pod = manifest["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    code, log, _ = run(pod["containers"][0]["command"][-1], JOB_INDEX="1", JOB_COMPLETION_INDEX="2")
    assert code == 0 and log == [f"demo-slice-0-0.demo:8476 6/8 slice 1 {FLAGS} --config.mesh.data=2"]


def test_slurm_requeues_after_sigterm_and_not_after_an_error(run):
    script = made([*SLURM[:-2], "--retries=2", "--topology=h100:2x8"]).text
    code, log, _ = run(script)
    assert code == 0 and log == [f"first:8476 {n}/2 slice - {FLAGS}" for n in (1, 0)]
    for program, restarts, requeued in (("75", "1", True), ("143", "0", True), ("75", "2", False), ("1", "0", False)):
        code, log, _ = run(script, program, SLURM_RESTART_COUNT=restarts)
        assert code == int(program) and (log[-1] == "scontrol requeue 7") == requeued


def test_queued_resources_are_asked_for_used_lost_and_asked_for_again(run):
    script = made([*QUEUED[:-2], "--topology=v6e:2x4", "--slices=2", "--spot"]).text
    states = "ABSENT WAITING_FOR_RESOURCES PROVISIONING ACTIVE SUSPENDED ABSENT ACTIVE"
    code, log, error = run(script, "75 0", states)
    assert code == 0, error
    create = (
        "create --accelerator-type=v6e-8 --runtime-version=v2-alpha-tpuv6e --node-count=2 --node-prefix=demo --spot"
    )
    calls = [line for line in log if line.startswith(("create", "delete"))]
    assert calls == [create, "delete --force --quiet"] * 2
    flags = f"{FLAGS} --config.mesh.data=2"
    started = sorted(line for line in log if line.startswith("10."))
    assert started == sorted(2 * [f"10.0.0.1:8476 {n}/4 slice {n // 2} {flags}" for n in range(4)])
    assert sorted({line for line in log if line.startswith("ssh")}) == [
        f"ssh demo-{slice} --worker={worker}" for slice in (0, 1) for worker in (0, 1)
    ]


def test_queued_resources_end_with_the_programs_own_error_and_after_the_last_retry(run):
    script = made([*QUEUED[:-2], "--topology=v6e:2x2", "--retries=1"]).text
    code, log, _ = run(script, "1", "ACTIVE")
    assert code == 1 and log[-1] == "delete --force --quiet" and len([x for x in log if x.startswith("10.")]) == 1
    code, log, error = run(script, "75 75 0", "ACTIVE ACTIVE ACTIVE")
    assert code == 75 and len([x for x in log if x.startswith("10.")]) == 2 and "all that --retries allows" in error


def test_a_request_that_failed_or_never_comes_ends_the_script(run):
    code, _, error = run(made([*QUEUED, "--topology=v6e:2x2"]).text, "", "FAILED FAILED")
    assert code == 1
    code, _, error = run(made([*QUEUED, "--topology=v6e:2x2", "--wait=120"]).text, "", "WAITING " * 5)
    assert code == 1 and "WAITING after 120 s in the queue" in error
