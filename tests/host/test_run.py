"""Whole runs of the real program: trained, killed, resumed, measured, and told apart from broken ones."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from glm_jax.host.errors import PreemptedError
from glm_jax.host.goodput import NAMES
from glm_jax.host.ledger import replay
from glm_jax.io.hf import load
from glm_jax.report.metrics import read_metrics

pytestmark = pytest.mark.rollout

ROOT = Path(__file__).resolve().parents[2]
STEPS = 3 + 2 + 6
CONFIG = """
from glm_jax.config.strict import default_config

def get_config():
    from glm_jax.host.config import RunConfig
    config = default_config(RunConfig)
    config.model.preset = "small"
    widths = dict(hidden_size=32, intermediate_size=64, moe_intermediate_size=32, q_lora_rank=16, kv_lora_rank=16)
    config.model.changes = dict(widths, index_topk=8)
    config.rollout.update(slots=8, window=24, ticks=8, queue=16, requests=8, prefill_slots=4, prefill_chunk=8, page=4)
    config.learn.update(micro_batches=2, rows=8, length=24)
    config.tasks.update(train_size=64, eval_size=8, template="{metadata[word]}\\n")
    config.tasks.families = (dict(name="spell_backward", settings=dict(min_word_len=3, max_word_len=5)),)
    config.sft.update(steps=3, batch=8)
    config.sft.policy_lr.peak = 1e-3
    config.value.update(steps=2, batch=8)
    config.value.critic_lr.peak = 1e-3
    config.rl.update(steps=6, batch=8)
    config.rl.policy_lr.peak = 1e-3
    config.rl.critic_lr.peak = 1e-3
    config.eval.every = 3
    config.checkpoint.every = 2
    config.deterministic = True
    return config
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    (folder / "config.py").write_text(CONFIG)
    return folder


def command(place: Path, verb: str, *flags: str) -> list[str]:
    return [sys.executable, "-m", "glm_jax", verb, "--config", str(place / "config.py"), *flags]


def call(place: Path, verb: str, *flags: str) -> subprocess.CompletedProcess:
    return subprocess.run(command(place, verb, *flags), cwd=ROOT, capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def whole(place):
    done = call(place, "train", "--workdir", str(place / "whole"))
    assert done.returncode == 0, done.stderr
    return place / "whole"


def same_files(a: Path, b: Path) -> None:
    left, right = load(a / "policy")[1], load(b / "policy")[1]
    import jax

    for x, y in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()
    assert (a / "ledger.jsonl").read_bytes() == (b / "ledger.jsonl").read_bytes()


def test_a_run_leaves_its_policy_its_figures_and_its_picture(whole):
    rows = read_metrics(whole)
    learned = [row for row in rows if "time/round" in row]
    assert [row["step"] for row in learned] == list(range(1, STEPS + 1))
    assert [row["step"] for row in rows if "eval/exact_match" in row] == [5, 8, 11]
    assert learned[-1]["compile/count"] == learned[5]["compile/count"] <= 3, "shapes changed and compiled anew"
    wanted = "rollout/logprob_gap_mean rollout/idle_slot_share critic/explained_variance staleness/lag_1 time/wall"
    assert all(any(name in row for row in rows) for name in wanted.split())
    spent = {name: learned[-1][f"goodput/{name}"] for name in NAMES}
    assert sum(spent.values()) == pytest.approx(learned[-1]["time/wall"], rel=0.02)
    assert spent["compile"] > 0.1 and spent["checkpoint"] > 0 and 0 < learned[-1]["goodput/share"] < 1
    book = replay(whole / "ledger.jsonl")
    assert not book.live and book.fates["trained"] == 8 * 8 and book.fates["unused"] >= 3 * 8
    assert (whole / "run.png").stat().st_size > 10_000 and "asked" in (whole / "samples.txt").read_text()
    assert list((whole / "tensorboard").iterdir())


def test_a_finished_run_says_that_nothing_is_left_to_do(place, whole):
    again = call(place, "train", "--workdir", str(whole))
    assert again.returncode == 0 and "nothing left to do" in again.stdout


def test_what_a_kill_kept_a_finished_run_from_leaving_is_made_up_for(place, whole):
    before = (whole / "policy" / "model.safetensors").read_bytes()
    (whole / "policy" / "config.json").unlink()
    again = call(place, "train", "--workdir", str(whole))
    assert again.returncode == 0, again.stderr
    assert (whole / "policy" / "config.json").exists()
    assert (whole / "policy" / "model.safetensors").read_bytes() == before


def test_another_config_in_the_same_workdir_is_refused(place, whole):
    again = call(place, "train", "--workdir", str(whole), "--config.rl.batch=16", "--config.seed=4")
    assert again.returncode == 1 and "Traceback" not in again.stderr
    assert "rl.batch: 8 there, 16 now" in again.stderr and "seed: 0 there, 4 now" in again.stderr


def test_a_run_that_has_ended_goes_on_when_it_is_given_more_steps(place, whole, tmp_path):
    longer = tmp_path / "longer"
    shutil.copytree(whole, longer)
    again = call(place, "train", "--workdir", str(longer), "--config.rl.steps=7")
    assert again.returncode == 0, again.stderr
    for said in (f"going on from step {STEPS}", "not bit for bit", "rl.steps: 6 there, 7 now"):
        assert said in again.stdout
    assert [row["step"] for row in read_metrics(longer) if "time/round" in row] == list(range(1, STEPS + 2))
    assert (longer / "policy/model.safetensors").read_bytes() != (whole / "policy/model.safetensors").read_bytes()
    book = replay(longer / "ledger.jsonl")
    assert not book.live and book.fates["trained"] == 9 * 8
    assert "nothing left to do" in call(place, "train", "--workdir", str(longer), "--config.rl.steps=7").stdout


def test_killed_ten_times_at_random_moments_it_ends_with_the_same_bits(place, whole):
    torn, rng, kills = place / "torn", np.random.default_rng(0), 0
    for _ in range(40):
        process = subprocess.Popen(
            command(place, "train", "--workdir", str(torn)), cwd=ROOT, stdout=subprocess.DEVNULL, start_new_session=True
        )
        # Once the run has begun to write, at a random moment after.
        size = lambda: (torn / "ledger.jsonl").stat().st_size if (torn / "ledger.jsonl").exists() else -1
        before, deadline = size(), time.monotonic() + 200
        while process.poll() is None and size() == before and time.monotonic() < deadline:
            time.sleep(0.005)
        time.sleep(float(rng.uniform(0, 0.4)))
        if process.poll() is None and kills < 10:
            os.kill(process.pid, signal.SIGKILL)
            kills += 1
        if process.wait(timeout=200) == 0:
            break
    assert kills >= 3, "the run ended before it could be killed"
    same_files(whole, torn)


def test_sigterm_leaves_a_checkpoint_and_a_code_that_asks_for_another_start(place):
    workdir, flags = place / "preempted", ["--config.deterministic=False", "--config.checkpoint.every=0"]
    start = command(place, "train", "--workdir", str(workdir), *flags)
    process = subprocess.Popen(start, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 200
    while process.poll() is None and time.monotonic() < deadline:
        if (workdir / "metrics.jsonl").exists() and len(read_metrics(workdir)) > 1:
            process.send_signal(signal.SIGTERM)
            break
        time.sleep(0.005)
    error = process.communicate(timeout=200)[1]
    assert process.returncode == PreemptedError.exit_code == 75 and "Traceback" not in error, error
    step = int(re.search(r"told to stop \(SIGTERM\) at step (\d+); step \1 is kept", error)[1])
    assert 1 < step < STEPS
    again = call(place, "train", "--workdir", str(workdir), *flags)
    assert again.returncode == 0 and f"going on from step {step} of {STEPS}" in again.stdout, again.stderr
    assert [row["step"] for row in read_metrics(workdir) if "time/round" in row] == list(range(1, STEPS + 1))
    book = replay(workdir / "ledger.jsonl")
    assert not book.live and book.fates["trained"] == 8 * 8


def test_eval_agrees_about_a_workdir_and_the_folder_that_it_exported(place, whole, tmp_path):
    for source in (["--workdir", str(whole)], ["--model", str(whole / "policy")]):
        found = call(place, "eval", *source, "--samples", "2", "--json", str(tmp_path / f"{len(source[0])}.json"))
        assert found.returncode == 0, found.stderr
        assert "pass@1" in found.stdout and "8 held-out questions" in found.stdout
    one, other = (json.loads(path.read_text()) for path in sorted(tmp_path.iterdir()))
    assert one["pass@2"] == other["pass@2"] and one["metrics"] == other["metrics"]


def test_a_dry_run_prints_the_config_and_the_memory(place):
    found = call(place, "train", "--dry_run", "--config.rl.steps=9")
    assert found.returncode == 0, found.stderr
    assert (
        "rl.steps = 9" in found.stdout
        and "optimizer" in found.stdout
        and "activations" in found.stdout
        and "MiB" in found.stdout
    )


REWARDS = {
    "raises": ("raise KeyError('lost')", "raised"),
    "nan": ("return float('nan')", "nan"),
    "sleeps": ("import time; time.sleep(60)", "timed_out"),
}


@pytest.mark.parametrize("kind", REWARDS)
def test_a_reward_that_never_works_ends_the_run_with_its_cause(place, tmp_path, kind, monkeypatch):
    body, cause = REWARDS[kind]
    (tmp_path / "bad_rewards.py").write_text(f"def score(completion, task):\n    {body}\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    limits = ["--config.reward.time_limit=0.2", "--config.reward.workers=4", "--config.tasks.reward=bad_rewards:score"]
    found = call(place, "train", "--workdir", str(tmp_path / "run"), *limits)
    assert found.returncode == 1 and "Traceback" not in found.stderr, found.stderr
    assert "rewards were all invalid" in found.stderr and cause in found.stderr


def test_a_prompt_longer_than_the_window_is_told_with_its_length(place, tmp_path):
    template = "--config.tasks.template={question} and much more than the window can hold {metadata[word]}"
    found = call(place, "train", "--workdir", str(tmp_path), template)
    assert found.returncode == 1 and "Traceback" not in found.stderr
    assert "72 of 72 prompts leave no room for an answer in rollout.window = 24 tokens" in found.stderr
