"""`kill -9` of the whole process at random moments: the resumed run ends with the bits of an unbroken one."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np

from glm_jax.host.ledger import replay
from tests.host.killable import STEPS, main

ROOT = Path(__file__).resolve().parents[2]
KILLS = 5


def start(workdir: Path) -> subprocess.Popen:
    command = [sys.executable, "-m", "tests.host.killable", str(workdir), "0.02"]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_killed_at_random_moments_it_ends_with_the_bits_of_an_unbroken_run(tmp_path):
    main(tmp_path / "whole", 0.0)
    torn, rng, killed = tmp_path / "torn", np.random.default_rng(3), 0
    for _ in range(KILLS):
        process = start(torn)
        assert process.stdout.readline() == "running\n", process.communicate()[1]
        try:
            process.wait(timeout=float(rng.uniform(0.05, 0.6)))
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            killed += 1
        process.communicate()
    process = start(torn)
    error = process.communicate(timeout=120)[1]
    assert process.returncode == 0, error
    assert killed >= 3, "the run was over before it could be killed"
    assert json.loads((torn / "weights.json").read_text()) == json.loads((tmp_path / "whole/weights.json").read_text())
    assert (torn / "ledger.jsonl").read_bytes() == (tmp_path / "whole" / "ledger.jsonl").read_bytes()
    book = replay(torn / "ledger.jsonl")
    assert not book.live and book.fates["trained"] == (STEPS - 2) * 4
