"""A run of two processes: the numbers of one; one is killed, the other ends, and what is relaunched goes on."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest

from glm_jax.host.cluster import NUMBER
from glm_jax.host.errors import PreemptedError
from glm_jax.host.events import read_events
from glm_jax.host.ledger import replay
from glm_jax.host.watch import LOST
from glm_jax.io.checkpoints import SEAL
from glm_jax.io.hf import load
from glm_jax.report.metrics import read_metrics
from tests.processes import started

pytestmark = pytest.mark.scale

STEPS, KEPT = 6, 2
# Experts lie on all four devices: their tokens travel between the processes, and so do the weights.
CONFIG = f"""
from glm_jax.config.strict import default_config

def get_config():
    from glm_jax.host.config import RunConfig
    config = default_config(RunConfig)
    config.model.preset = "small"
    widths = dict(hidden_size=32, intermediate_size=64, moe_intermediate_size=32, q_lora_rank=16, kv_lora_rank=16)
    layers = dict(num_hidden_layers=1, indexer_types=("full",), mlp_layer_types=("sparse",))
    config.model.changes = dict(widths, **layers, index_topk=8)
    config.mesh.expert = 4
    config.rollout.update(slots=8, window=16, ticks=8, queue=16, requests=8, prefill_slots=8, prefill_chunk=8)
    config.learn.update(micro_batches=1, rows=8, length=16, advantage="running_mean")
    config.tasks.update(train_size=64, eval_size=8, template="{{metadata[word]}}\\n")
    config.tasks.families = (dict(name="spell_backward", settings=dict(min_word_len=3, max_word_len=5)),)
    config.stages = ("rl",)
    config.rl.update(steps={STEPS}, batch=8)
    config.rl.policy_lr.peak = 1e-3
    config.eval.every = 3
    config.checkpoint.every = {KEPT}
    config.deterministic = True
    return config
"""

REWARD = f"""
import os

if os.environ["{NUMBER}"] == "1":
    raise ImportError("not on this host")
score = lambda completion, task: 1.0
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("processes")
    (folder / "config.py").write_text(CONFIG)
    return folder


def run(place: Path, name: str, count: int, *more: str, **environment: str):
    """Starts the run as `count` processes, of four devices together."""
    flags = ["--config", str(place / "config.py"), "--workdir", str(place / name)]
    command = [sys.executable, "-m", "glm_jax", "train", *flags, *more]
    return started(command, count, 4 // count, **environment)


def ends(processes) -> list[tuple[int, str]]:
    """Exit code and errors of each."""
    return [(process.returncode, error) for process in processes for _, error in [process.communicate(timeout=300)]]


def whole(place: Path, name: str, count: int) -> Path:
    with run(place, name, count) as processes:
        for code, error in ends(processes):
            assert code == 0, error
    return place / name


@pytest.fixture(scope="module")
def two(place):
    return whole(place, "two", 2)


def weights(workdir: Path) -> list[np.ndarray]:
    return [np.asarray(leaf) for leaf in jax.tree.leaves(load(workdir / "policy")[1])]


def events(workdir: Path) -> list[dict]:
    return [{k: v for k, v in event.items() if k != "logp"} for event in read_events(workdir / "ledger.jsonl")]


def test_two_processes_come_to_the_numbers_of_one_and_go_on_from_a_kill_to_the_same_bits(place, two):
    with run(place, "torn", 2) as processes:
        deadline = time.monotonic() + 240
        while not (place / "torn" / "checkpoints" / str(KEPT) / SEAL).exists():
            assert time.monotonic() < deadline and processes[1].poll() is None, "no checkpoint was made"
            time.sleep(0.1)
        processes[1].kill()
        limit = time.monotonic() + 2 * LOST
        one = whole(place, "one", 1)  # meanwhile
        processes[0].wait(max(1.0, limit - time.monotonic()))
        (code, error), _ = ends(processes)
    assert code == PreemptedError.exit_code
    assert "process 1 has given no sign of life for" in error and "goes on from the last checkpoint" in error
    assert replay(place / "torn" / "ledger.jsonl").fates["trained"] < STEPS * 8, "it was done before it was killed"

    again = whole(place, "torn", 2)
    assert (again / "ledger.jsonl").read_bytes() == (two / "ledger.jsonl").read_bytes()
    for a, b in zip(weights(again), weights(two), strict=True):
        assert a.tobytes() == b.tobytes()

    assert events(one) == events(two)
    for a, b in zip(weights(one), weights(two), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)
    rows = [read_metrics(workdir) for workdir in (one, two)]
    for name in ("policy/loss", "policy/grad_norm", "rollout/reward", "eval/reward"):
        values = [[row[name] for row in part if name in row] for part in rows]
        assert len(values[0]) >= 3
        np.testing.assert_allclose(*values, atol=1e-5)


def test_process_0_alone_writes(two):
    """Two writers would double the rows, and their ledgers would not replay."""
    steps = [row["step"] for row in read_metrics(two) if "time/round" in row]
    assert steps == list(range(1, STEPS + 1))
    assert len(list((two / "tensorboard").iterdir())) == 1
    assert replay(two / "ledger.jsonl").fates["trained"] == STEPS * 8
    assert json.loads((two / "config.json").read_text())["rl.steps"] == STEPS


def test_an_error_of_one_process_ends_all_with_its_code(place):
    (place / "torn_reward.py").write_text(REWARD)
    with run(place, "failed", 2, "--config.tasks.reward=torn_reward:score", PYTHONPATH=str(place)) as processes:
        (first, told), (second, error) = ends(processes)
    assert first == second == 1
    assert "glm-jax train: " in error and "ImportError: not on this host" in error
    assert "glm-jax: process 1 stopped: PoolError: " in told and "not on this host" in told
