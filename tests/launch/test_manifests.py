"""What is submitted is well-formed: JobSets by their schemas, scripts by bash and shellcheck, the README's commands."""

from __future__ import annotations

import ast
import re
import shlex
import subprocess
import sys
from pathlib import Path

import jsonschema
import kubernetes_validate
import pytest
import yaml

from glm_jax.host.cluster import COORDINATOR, COUNT, NUMBER
from glm_jax.host.errors import PreemptedError
from launch.__main__ import submission
from launch.job import RETRIED
from tests.launch.schema import JOBSET

ROOT = Path(__file__).resolve().parents[2]
KUBERNETES = "1.34.0"
TRAIN = ["--", "--config", "experiments/configs/demo.py", "--workdir", "/runs/it's demo"]
GKE = ["gke", "--name=demo", "--image=image", "--claim=runs:/runs", "--print"]
QUEUED = ["queued", "--name=demo", "--zone=z", "--project=p", "--prelude=source /runs/venv/bin/activate", "--print"]
SLURM = ["slurm", "--name=demo", "--option=--partition=gpu", "--prelude=source /runs/venv/bin/activate", "--print"]
XPK = ["xpk", "--name=demo", "--zone=z", "--project=p", "--cluster=c", "--storage=s", "--image=image", "--print"]


def made(argv: list[str], train: list[str] = TRAIN):
    return submission([*argv, *train])[0]


def commands() -> list[str]:
    blocks = re.findall(r"```sh\n(.*?)```", (ROOT / "launch/README.md").read_text(), flags=re.S)
    return [line for block in blocks for line in block.splitlines()]


def shell(text: str) -> None:
    """Raises unless bash reads it and shellcheck finds nothing worse than a matter of style."""
    text = text if text.startswith("#!") else f"#!/bin/bash\n{text}\n"
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)
    checker = Path(sys.executable).with_name("shellcheck")
    # SC2016: what stands in single quotes is for another shell, which expands it there.
    options = ["--severity=info", "--exclude=SC2016", "-"]
    found = subprocess.run([checker, *options], input=text, text=True, capture_output=True)
    assert found.returncode == 0, found.stdout + found.stderr


def check_jobset(text: str) -> dict:
    manifest = yaml.safe_load(text)
    jsonschema.validate(manifest, JOBSET)
    for child in manifest["spec"]["replicatedJobs"]:
        job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"}, **child["template"]}
        kubernetes_validate.validate(job, KUBERNETES, strict=True)
    return manifest


@pytest.mark.parametrize("flags", [["--topology=v5p:4x4x8"], ["--topology=v6e:16x16", "--slices=4", "--spot"]])
def test_a_jobset_of_tpus(flags):
    manifest = check_jobset(made([*GKE, *flags]).text)
    (child,) = manifest["spec"]["replicatedJobs"]
    job = child["template"]["spec"]
    pod = job["template"]["spec"]
    (container,) = pod["containers"]
    replicas, hosts, shape = (1, 32, "4x4x8") if len(flags) == 1 else (4, 64, "16x16")
    assert (child["replicas"], job["completions"], job["parallelism"]) == (replicas, hosts, hosts)
    assert pod["nodeSelector"]["cloud.google.com/gke-tpu-topology"] == shape
    assert container["resources"]["limits"] == {"google.com/tpu": 4}
    assert f"{COUNT}={replicas * hosts}\n" in container["command"][-1]
    assert (pod["nodeSelector"].get("cloud.google.com/gke-spot") == "true") == ("--spot" in flags)
    shell(container["command"][-1])


def test_a_jobset_of_gpus():
    manifest = check_jobset(made([*GKE, "--topology=h200:4x8"]).text)
    job = manifest["spec"]["replicatedJobs"][0]["template"]["spec"]
    pod = job["template"]["spec"]
    assert job["completions"] == 4 and pod["containers"][0]["resources"]["limits"] == {"nvidia.com/gpu": 8}
    assert pod["nodeSelector"] == {"cloud.google.com/gke-accelerator": "nvidia-h200-141gb"}
    assert "annotations" not in manifest["metadata"]


def test_schemas_catch_a_misspelt_key():
    text = made([*GKE, "--topology=h200:4x8"]).text
    for right, wrong in (("maxRestarts", "maxRestart"), ("backoffLimit", "backofLimit"), ("restartPolicy", "restart")):
        with pytest.raises((jsonschema.ValidationError, kubernetes_validate.ValidationError)):
            check_jobset(text.replace(right, wrong))


def test_only_codes_that_may_go_away_start_a_jobset_again():
    manifest = check_jobset(made([*GKE, "--topology=h100:2x8", "--retries=7"]).text)
    policy = manifest["spec"]["failurePolicy"]
    assert policy["maxRestarts"] == 7
    assert [(r["action"], r["onJobFailureReasons"]) for r in policy["rules"]] == [("FailJobSet", ["PodFailurePolicy"])]
    job = manifest["spec"]["replicatedJobs"][0]["template"]["spec"]
    (rule,) = job["podFailurePolicy"]["rules"]
    assert rule["action"] == "FailJob" and job["backoffLimit"] == 0
    assert rule["onExitCodes"]["operator"] == "NotIn" and rule["onExitCodes"]["values"] == [75, 134, 137, 143]
    assert PreemptedError.exit_code in RETRIED and 1 not in RETRIED and list(RETRIED) == sorted(RETRIED)


@pytest.mark.parametrize("topology", ["--topology=v5p:2x2x1", "--topology=v6e:4x4"])
@pytest.mark.parametrize("slices", ["--slices=1", "--slices=3"])
def test_scripts_of_queued_resources_are_sound(topology, slices):
    shell(made([*QUEUED, topology, slices]).text)


def test_scripts_of_slurm_and_xpk_are_sound():
    shell(made([*SLURM, "--topology=h100:16x8"]).text)
    words = made([*XPK, "--topology=tpu7x:4x4x8", "--slices=2"]).command
    shell(words[words.index("--command") + 1])
    assert "--tpu-type=tpu7x-4x4x8" in words and "--num-slices=2" in words


@pytest.mark.parametrize("line", commands())
def test_the_commands_of_the_readme_print(line):
    words = shlex.split(line)
    assert words[:3] == ["python", "-m", "launch"] and "--print" in words
    done = subprocess.run([sys.executable, *words[1:]], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "glm-jax train --config experiments/configs/demo.py --workdir" in done.stdout
    if words[3] == "gke":
        check_jobset(done.stdout)
    else:
        shell(done.stdout)


def test_it_imports_nothing_of_the_rooms_that_compute():
    for path in (ROOT / "launch").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) else []
            for name in names:
                root = name.partition(".")[0]
                assert root in (*sys.stdlib_module_names, "launch", "yaml"), f"{path.name} imports {name}"


def test_processes_are_told_by_the_names_that_the_program_reads():
    for argv in ([*GKE, "--topology=v6e:4x4"], [*QUEUED, "--topology=v6e:4x4"], [*SLURM, "--topology=h100:2x8"]):
        for name in (COORDINATOR, COUNT, NUMBER):
            assert f"export {name}=" in made(argv).text
