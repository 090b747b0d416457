"""A run in real boxes, from transcripts to RL: killed and resumed to the same bits, and its policy as an agent."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

from glm_jax.data.tokenizer import ByteTokenizer
from glm_jax.host import calls
from glm_jax.host.events import read_events
from glm_jax.host.ledger import replay
from tests.host.test_run import ROOT, same_files

pytestmark = pytest.mark.rollout
FAMILY = ROOT / "experiments" / "families" / "copy-word"
CONFIG = """
from glm_jax.config.strict import default_config

def get_config():
    from glm_jax.host.config import RunConfig
    config = default_config(RunConfig)
    config.model.preset = "small"
    widths = dict(hidden_size=32, intermediate_size=64, moe_intermediate_size=32, q_lora_rank=16, kv_lora_rank=16)
    config.model.changes = dict(widths, index_topk=16)
    config.rollout.update(slots=4, window=176, ticks=16, queue=8, requests=8, prefill_slots=4, prefill_chunk=16)
    config.learn.update(micro_batches=2, rows=4, length=176)
    config.tasks.update(source="environments", environments=("FOLDER",), train_size=32, eval_size=2)
    config.tools.update(turns=3, observation=16, transcripts=8)
    config.sft.update(steps=16, batch=8)
    config.sft.policy_lr.peak = 1e-2
    config.value.update(steps=1, batch=4)
    config.value.critic_lr.peak = 1e-3
    config.rl.update(steps=4, batch=4)
    config.rl.policy_lr.peak = 1e-3
    config.rl.critic_lr.peak = 1e-3
    config.eval.every = 0
    config.checkpoint.every = 2
    config.deterministic = True
    return config
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tools")
    (folder / "config.py").write_text(CONFIG.replace("FOLDER", str(FAMILY)))
    return folder


def train(place: Path, name: str, *flags: str) -> subprocess.Popen:
    command = [sys.executable, "-m", "glm_jax", "train", "--config", str(place / "config.py"), *flags]
    out = open(place / f"{name}.txt", "w")
    return subprocess.Popen([*command, "--workdir", str(place / name)], cwd=ROOT, stdout=out, stderr=out)


@pytest.fixture(scope="module")
def whole(place) -> Path:
    code = train(place, "whole").wait(timeout=400)
    assert code == 0, (place / "whole.txt").read_text()[-3000:]
    return place / "whole"


def test_what_the_policy_said_and_saw_is_in_the_ledger_and_every_rollout_has_its_fate(whole):
    book = replay(whole / "ledger.jsonl")
    assert not book.live and book.fates["trained"] == 5 * 4 and not book.fates["failed"]
    tokenizer, said, seen = ByteTokenizer(), {}, 0
    for event in read_events(whole / "ledger.jsonl"):
        if event["event"] == "tokens":
            said.setdefault(event["id"], []).extend(event["tokens"])
        elif event["event"] == "observation":
            seen += 1
            assert said[event["id"]][-1] == tokenizer.tags[calls.CLOSE]
            said[event["id"]] = []
    assert seen > 0


def test_killed_with_9_it_leaves_no_process_and_ends_with_the_same_bits(place, whole):
    rng, kills, ledger = np.random.default_rng(1), 0, place / "torn" / "ledger.jsonl"
    size = lambda: ledger.stat().st_size if ledger.exists() else -1
    for _ in range(8):
        process = train(place, "torn")
        before, deadline = size(), time.monotonic() + 200
        while process.poll() is None and size() <= max(before, 0) and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(float(rng.uniform(0, 0.6)))
        if process.poll() is None and kills < 2:
            below = psutil.Process(process.pid).children(recursive=True)
            os.kill(process.pid, signal.SIGKILL)
            kills += 1
            _, alive = psutil.wait_procs(below, timeout=10)
            assert not [p for p in alive if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
        if process.wait(timeout=400) == 0:
            break
    assert kills == 2, "the run ended before it could be killed"
    same_files(whole, place / "torn")


def test_the_policy_is_an_agent_whose_transcript_and_reward_are_printed(whole):
    agent = ["--agent", f"policy:{whole / 'policy'}", "--turns", "1", "--instance", "3", "--observation", "16"]
    command = [sys.executable, "-m", "glm_jax", "envs", "run", str(FAMILY), *agent]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert found.returncode == 0, found.stderr
    assert "== assistant" in found.stdout and "reward" in found.stdout.splitlines()[-1]


def test_a_task_that_was_changed_after_its_gates_trains_nothing(place, tmp_path):
    shutil.copytree(FAMILY, tmp_path / "copy-word")
    (tmp_path / "copy-word" / "instruction.md").write_text("Write {{word}} into {{to}}, whatever {{from}} says.\n")
    process = train(place, "refused", f"--config.tasks.environments=('{tmp_path / 'copy-word'}',)")
    assert process.wait(timeout=200) == 1
    said = (place / "refused.txt").read_text()
    assert "was changed after it went through the gates" in said and "Traceback" not in said
