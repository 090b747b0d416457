"""Whose a workdir is: nobody's before something was recorded; then a run's, whose config moves no past."""

from __future__ import annotations

import json

import numpy as np
import pytest

from glm_jax.config.strict import read
from glm_jax.host.config import RunConfig
from glm_jax.host.errors import RunError
from glm_jax.host.run import train
from glm_jax.host.workdir import CHECKPOINTS, CONFIG, LEDGER, LOG, begun, check_ledger, check_workdir, flat
from glm_jax.io.checkpoints import CheckpointError, Checkpoints
from tests.host.test_config import config


def made(**changes) -> RunConfig:
    return read(RunConfig, config(**{"rl__steps": 4, "learn__advantage": "running_mean", "value__steps": 0} | changes))


def recorded(folder, found: RunConfig, ledger: str = "{}\n"):
    folder.mkdir(exist_ok=True)
    (folder / CONFIG).write_text(json.dumps(flat(found)))
    (folder / LEDGER).write_text(ledger)
    return folder


def test_a_refused_start_leaves_the_workdir_free(tmp_path):
    with pytest.raises(ValueError, match="no_such_family"):
        train(made(tasks__families=({"name": "no_such_family"},)), tmp_path)
    assert (tmp_path / CONFIG).exists() and not begun(tmp_path)
    with pytest.raises(ValueError, match="nor_this_one"):
        train(made(tasks__families=({"name": "nor_this_one"},), seed=1), tmp_path)
    assert json.loads((tmp_path / CONFIG).read_text())["seed"] == 1


def test_what_was_recorded_makes_the_workdir_its_runs_before_anything_is_compiled(tmp_path):
    recorded(tmp_path, made())
    with pytest.raises(CheckpointError, match="seed: 0 there, 1 now") as caught:
        train(made(seed=1, rl__steps=5), tmp_path)
    assert "rl.steps" not in str(caught.value)


def test_what_cannot_change_the_past_may_change_and_is_named(tmp_path):
    recorded(tmp_path, made())
    changes = dict(rl__steps=6, eval__every=3, checkpoint__keep=5, patience=9.0, reward__workers=3, profile_rounds=1)
    assert [line.split(":")[0] for line in check_workdir(tmp_path, made(**changes))] == [
        "checkpoint.keep",
        "eval.every",
        "patience",
        "profile_rounds",
        "reward.workers",
        "rl.steps",
    ]
    assert check_workdir(tmp_path, made()) == []


@pytest.mark.parametrize(
    ("before", "changes", "step", "told"),
    [
        ({}, dict(rl__batch=4), 0, "rl.batch: "),
        (dict(deterministic=True), dict(checkpoint__every=7), 0, "checkpoint.every: .*deterministic = True"),
        (dict(deterministic=True), dict(eval__every=7), 0, "eval.every: .*deterministic = True"),
        (dict(rl__policy_lr__shape="cosine"), dict(rl__steps=8), 3, "rl.policy_lr is a cosine over all steps"),
        ({}, dict(rl__steps=2), 3, "step 3 of rl is made already"),
        (dict(sft__steps=2, sft__policy_lr__peak=1e-3), dict(sft__steps=3), 0, "sft.steps: 2 there, 3 now"),
    ],
)
def test_what_would_change_the_past_is_refused_with_its_reason(tmp_path, before, changes, step, told):
    base = dict(sft__steps=0)
    was, now = made(**base | before), made(**base | before | changes)
    recorded(tmp_path, was)
    with pytest.raises(CheckpointError, match=told):
        check_workdir(tmp_path, now, {"config": flat(was), "step": step})


def test_a_cosine_may_grow_while_only_its_warm_up_is_made(tmp_path):
    cosine = dict(sft__steps=0, rl__policy_lr__shape="cosine", rl__policy_lr__warmup=3)
    recorded(tmp_path, made(**cosine))
    was = {"config": flat(made(**cosine)), "step": 3}
    assert len(check_workdir(tmp_path, made(**cosine, rl__steps=9), was)) == 1


def test_a_cut_config_is_made_up_for_by_the_checkpoint_and_named_where_there_is_none(tmp_path, caplog):
    recorded(tmp_path, made())
    (tmp_path / CONFIG).write_text('{"seed": ')
    host = {"config": flat(made()), "step": 0}
    assert check_workdir(tmp_path, made(), host) == [] and "config.json cannot be read" in caplog.text
    with pytest.raises(CheckpointError, match="seed: 0 there, 1 now"):
        check_workdir(tmp_path, made(seed=1), host)
    with pytest.raises(CheckpointError, match="config.json is missing or damaged, and no checkpoint"):
        train(made(), tmp_path)


def test_a_ledger_that_is_gone_or_cut_is_named_with_the_checkpoints_that_go_without(tmp_path):
    with Checkpoints(tmp_path / CHECKPOINTS, keep=3) as saver:
        for step, offset in ((1, 0), (2, 10), (3, 30)):
            saver.save(step, {"w": np.zeros(2)}, None, {"offset": offset})
        saver.wait()
        host = {"offset": 30}
        with pytest.raises(RunError, match="ledger.jsonl is missing, but checkpoint 3 .* goes on from step 1"):
            check_ledger(tmp_path, 3, host)
        (tmp_path / LEDGER).write_bytes(b"0123456789ab")
        with pytest.raises(RunError, match="holds 12 bytes, but checkpoint 3 .* goes on from step 2"):
            check_ledger(tmp_path, 3, host)
        check_ledger(tmp_path, 2, {"offset": 10})


def test_a_file_in_the_place_of_the_checkpoints_is_named(tmp_path):
    (tmp_path / CHECKPOINTS).write_text("")
    with pytest.raises(CheckpointError, match="checkpoints is no folder, and holds no checkpoint to go on from"):
        train(made(), tmp_path)


def test_a_folder_in_the_place_of_a_file_is_named(tmp_path):
    (tmp_path / LOG).mkdir()
    with pytest.raises(RunError, match="log.txt: Is a directory"):
        train(made(), tmp_path)


def test_a_workdir_that_is_a_file_is_named(tmp_path):
    (tmp_path / "run").write_text("")
    with pytest.raises(RunError, match="run: File exists"):
        train(made(), tmp_path / "run")
