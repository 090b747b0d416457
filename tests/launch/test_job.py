"""What the table says of a topology, and which jobs are refused with what words."""

from __future__ import annotations

import subprocess
import sys

import pytest

from launch.__main__ import main
from launch.topology import LaunchError, read
from tests.launch.test_manifests import GKE, QUEUED, ROOT, SLURM, XPK, made


@pytest.mark.parametrize(
    ("name", "chips", "hosts", "accelerator_type"),
    [
        ("v5p:8x8x8", 512, 128, "v5p-1024"),
        ("v5p:2x2x1", 4, 1, "v5p-8"),
        ("v6e:16x16", 256, 64, "v6e-256"),
        ("tpu7x:4x4x8", 128, 32, "tpu7x-4x4x8"),
        ("h100:16x8", 128, 16, "h100-16x8"),
    ],
)
def test_the_table(name, chips, hosts, accelerator_type):
    topology = read(name)
    assert (topology.chips, topology.hosts, topology.accelerator_type) == (chips, hosts, accelerator_type)
    assert str(topology) == name


NO_WORKDIR = ["--", "--config=c"]
ELSEWHERE = ["--", "--config=c", "--workdir=/runsaway/x"]
ODD = ["--", "--config=c", "--workdir=/runs/x", "--config.mesh.data=3"]


@pytest.mark.parametrize(
    ("argv", "train", "told"),
    [
        ([*GKE, "--topology=v4:2x2x1"], None, "'v4' is no known machine; known: v5p, v6e"),
        ([*GKE, "--topology=v6e:3x3"], None, "v6e is sold as 2x2, 2x4"),
        ([*GKE, "--topology=h100:16x4"], None, "write h100:HOSTSx8"),
        ([*GKE, "--topology=h100:0x8"], None, "write h100:HOSTSx8"),
        ([*GKE, "--topology=h100:2x8", "--slices=2"], None, "take more hosts of h100 instead"),
        ([*GKE, "--topology=v6e:2x2", "--slices=0"], None, "--slices=0"),
        ([*GKE, "--topology=v6e:2x2", "--slices=2"], ODD, "a multiple of --slices=2"),
        ([*GKE, "--topology=v6e:2x2"], NO_WORKDIR, "--workdir missing after --"),
        ([*GKE, "--topology=v6e:2x2"], ELSEWHERE, "lies outside of /runs"),
        ([*GKE, "--topology=v6e:2x2", "--claim=runs"], None, "write NAME:/PATH"),
        ([*GKE, "--topology=v6e:2x2", "--name=Demo"], None, "--name=Demo: up to 40"),
        ([*QUEUED, "--topology=tpu7x:2x2x1"], None, "tpu7x has no queued resources; use gke"),
        ([*QUEUED, "--topology=h100:2x8"], None, "h100 has no queued resources; use gke"),
        ([*SLURM, "--topology=v6e:2x2"], None, "SLURM is for GPUs"),
        ([*XPK, "--topology=h100:2x8"], None, "xpk is for TPUs"),
    ],
)
def test_what_cannot_run_is_refused(argv, train, told):
    with pytest.raises(LaunchError, match=told):
        made(argv, train) if train else made(argv)


def test_data_that_is_a_multiple_of_the_slices_stays_as_it_is():
    text = made([*GKE, "--topology=v6e:2x2", "--slices=2"], [*ODD[:-1], "--config.mesh.data=4"]).text
    assert "--config.mesh.data=4\n" in text and "mesh.data=2" not in text


def test_without_print_the_command_gets_the_text(tmp_path, monkeypatch, capsys):
    (tmp_path / "sbatch").write_text(f"#!/bin/bash\ncat > {tmp_path}/got\nexit 3\n")
    (tmp_path / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    argv = [*SLURM[:-1], "--topology=h100:2x8", "--", "--config=c", "--workdir=/runs/x"]
    assert main(argv) == 3
    got = (tmp_path / "got").read_text()
    assert main(["slurm", "--print", *argv[1:]]) == 0 and capsys.readouterr().out == got
    monkeypatch.setenv("PATH", "/nowhere")
    assert main(argv) == 1 and "sbatch is not on the PATH" in capsys.readouterr().err


def test_a_refusal_is_one_line_and_code_2():
    words = [sys.executable, "-m", "launch", "gke", "--topology=v9:2", "--name=x", "--image=i", "--claim=a:/b"]
    done = subprocess.run([*words, "--", "--config=c"], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and done.stderr.startswith("launch: --topology=v9:2") and "Traceback" not in done.stderr
