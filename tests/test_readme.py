"""Every command of the README runs, at smoke size."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import flags

ROOT = Path(__file__).resolve().parent.parent
SMALL = [
    f"--config.{k}" for k in ("sft.steps=3", "value.steps=1", "rl.steps=2", "tasks.train_size=600", "tasks.eval_size=8")
]
BATCH = [f"--config.{k}" for k in ("sft.batch=8", "value.batch=8", "rl.batch=8", "rollout.slots=8", "learn.rows=8")]
TINY = [*SMALL, *BATCH, "--config.rollout.prefill_slots=8"]
# What makes a command small, by how it begins; None marks what the rest of CI runs (or cannot run here), and why.
SMOKE: dict[str, list[str] | None] = {
    "make demo": None,  # its config at smoke size is the train command below
    "make test": None,  # .ci/run
    "pip install": None,  # needs an accelerator
    "sudo apt-get install bubblewrap": None,  # .ci/run
    "glm-jax envs check": [],
    "glm-jax envs run": [],
    "glm-jax bench sandbox": ["--smoke"],
    "glm-jax envs run experiments/families": ["--turns=1"],
    "glm-jax train": TINY,
    "glm-jax train --config experiments/configs/tool_use.py": [*TINY, "--config.tools.transcripts=8"],
    "glm-jax eval": TINY,
    "glm-jax plan": None,  # wants the TPU's compiler: tests/plan/test_compile.py
    "glm-jax generate": ["--max_new_tokens=4"],
    "glm-jax convert": [],
    "glm-jax bench rl": ["--smoke", "--repeats=1"],
    "glm-jax bench model": ["--smoke", "--repeats=1"],
    "glm-jax bench rollout": ["--smoke", "--repeats=1"],
    "glm-jax bench sparsity": ["--smoke", "--repeats=1"],
    "glm-jax bench router": ["--smoke", "--repeats=1"],
    "glm-jax bench checkpoint": ["--smoke", "--repeats=1"],
    "glm-jax bench flops": [],
    "glm-jax bench handoff": ["--repeats=1"],
    "glm-jax bench drafts": ["--smoke", *SMALL],
    "glm-jax bench critic": [*TINY, "--rollouts=16", "--config.rl.steps=0"],
    "python experiments/sweep.py": [],
}
VALUE_RUN = "glm-jax train --config experiments/configs/demo.py --workdir runs/value --config.rl.steps=0"


def commands() -> list[str]:
    """The lines of the README's shell blocks, without their comments."""
    blocks = re.findall(r"```sh\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.S)
    lines = [line for block in blocks for line in block.splitlines()]
    return [shlex.join(shlex.split(line, comments=True)) for line in lines if line.strip()]


def smoke(command: str) -> list[str] | None:
    """The command at smoke size, as this Python runs it; None where something else runs it."""
    name = max((k for k in SMOKE if command.startswith(k)), key=len, default=None)
    assert name is not None, f"the README shows {command!r}, which no smoke size is known for: add it to SMOKE"
    extra = SMOKE[name]
    if extra is None:
        return None
    words = shlex.split(command)
    start = [sys.executable] if words[0] == "python" else [sys.executable, "-m", "glm_jax"]
    if words[0] == "python":
        small = ["--set", "rl.steps=1", *(w for o in TINY for w in ("--set", o.removeprefix("--config.")))]
        small += ["--set", "rl.batch=4", "--set", "value.batch=4"]  # tau = 16 is in the sweep: less in flight
        return [*start, *words[1:], *small, "--seeds", "0"]
    last = ["--config.rl.steps=0"] if command == VALUE_RUN else []
    return [*start, *words[1:], *extra, *last]


def chains() -> dict[str, list[str]]:
    """The commands that run here: those that name the same run together and in the README's order, others alone.

    A value run for `bench critic`, of which the README tells in words, is made first.
    """
    found = {"runs/value": [VALUE_RUN]}
    for command in commands():
        if smoke(command) is not None:
            run = re.search(r"runs/\w+", command)
            found.setdefault(run[0] if run else command, []).append(command)
    return found


def test_every_command_of_the_readme_has_a_smoke_size():
    assert len(commands()) > 8
    for command in commands():
        smoke(command)


@pytest.mark.docs
@pytest.mark.parametrize("chain", chains())
def test_the_commands_of_the_readme_run(tmp_path, chain):
    """Every command leaves a folder as a reader finds it; that it runs is asked here, not what it computes."""
    (tmp_path / "experiments").symlink_to(ROOT / "experiments")
    questions = [{"question": f"say {word}{i}", "answer": word} for i in range(20) for word in ("yes", "no")]
    (tmp_path / "tasks.jsonl").write_text("\n".join(map(json.dumps, questions)))
    (tmp_path / "my_rewards.py").write_text(
        "def score(completion, task):\n    return float(completion == task['answer'])\n"
    )
    env = {**os.environ, "PYTHONPATH": str(tmp_path), "XLA_FLAGS": flags(4)}
    for command in chains()[chain]:
        small = smoke(command)
        done = subprocess.run(small, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, f"{command}\n{shlex.join(small)}\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}"
