"""Checkpoints: bit-equal, whole or skipped by name, and never taken for those of another run."""

from __future__ import annotations

import shutil
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct
from jax.sharding import NamedSharding, PartitionSpec

from glm_jax.io import checkpoints as checkpoints_module
from glm_jax.io.checkpoints import (
    SCORE,
    SEAL,
    UNFINISHED,
    CheckpointError,
    Checkpoints,
    damage,
    restore_weights,
)
from tests.processes import run_together


@struct.dataclass
class Learner:
    params: dict
    opt_state: tuple
    version: jax.Array


def learner(seed: int) -> Learner:
    keys = jax.random.split(jax.random.key(seed), 3)
    params = {"a": jax.random.normal(keys[0], (64, 33)), "b": {"c": jax.random.normal(keys[1], (8,), jnp.bfloat16)}}
    odd = jnp.asarray([jnp.nan, -0.0, jnp.inf, 1e-45], jnp.float32)
    return Learner(params, ({"mu": jax.random.normal(keys[2], (64, 33))}, odd), jnp.asarray(seed, jnp.int32))


def same_bits(x, y) -> bool:
    pairs = zip(jax.tree.leaves(x), jax.tree.leaves(y), strict=True)
    return all(a.dtype == b.dtype and np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in pairs)


@pytest.fixture
def folder(tmp_path):
    with Checkpoints(tmp_path / "checkpoints", keep=3) as checkpoints:
        for step in (2, 4, 6):
            checkpoints.save(step, learner(step), learner(step + 100), {"step": step, "deep": {"x": [1, 0.1]}})
    return tmp_path / "checkpoints"


def test_what_is_restored_is_bit_equal(folder):
    with Checkpoints(folder) as checkpoints:
        step, host = checkpoints.newest()
        policy, critic = checkpoints.restore(step, learner(0), learner(0))
    assert step == 6 and host == {"step": 6, "deep": {"x": [1, 0.1]}}
    assert same_bits(policy, learner(6)) and same_bits(critic, learner(106))
    assert isinstance(policy, Learner)


def test_a_run_without_a_critic_is_saved_without_one(tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, learner(1), None, {})
        policy, critic = checkpoints.restore(1, learner(0), None)
    assert critic is None and same_bits(policy, learner(1))


def test_arrays_come_back_onto_the_given_shardings(folder):
    mesh = jax.make_mesh((8,), ("fsdp",))
    split = NamedSharding(mesh, PartitionSpec("fsdp"))
    whole = NamedSharding(mesh, PartitionSpec())
    place = lambda x: jax.device_put(x, split if x.shape and x.shape[0] % 8 == 0 else whole)
    target = jax.tree.map(place, learner(0))
    with Checkpoints(folder) as checkpoints:
        policy, _ = checkpoints.restore(6, target, learner(0))
    assert policy.params["a"].sharding == split and same_bits(policy, learner(6))


def test_weights_alone_need_no_optimizer(folder):
    params = restore_weights(folder / "4", learner(0).params)
    assert same_bits(params, learner(4).params)


def test_the_last_n_are_kept(tmp_path):
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        for step in range(1, 6):
            checkpoints.save(step, learner(step), None, {})
    assert sorted(int(path.name) for path in tmp_path.iterdir()) == [4, 5]


def test_the_best_are_kept_beside_the_last(tmp_path):
    """Whoever saves them: a second process finds the scores of the first one's steps."""
    scores = {1: 0.5, 2: None, 3: 0.9, 4: 0.5, 5: 0.1, 6: 0.2}
    for steps in ((1, 2, 3), (4, 5, 6)):
        with Checkpoints(tmp_path, keep=2, best=3) as checkpoints:
            for step in steps:
                checkpoints.save(step, learner(step), None, {SCORE: scores[step]})
    assert sorted(int(path.name) for path in tmp_path.iterdir()) == [1, 3, 4, 5, 6]
    with Checkpoints(tmp_path, keep=2, best=2) as checkpoints:
        checkpoints.save(7, learner(7), None, {SCORE: 0.95})
    assert sorted(int(path.name) for path in tmp_path.iterdir()) == [3, 6, 7]


def test_no_step_goes_before_the_next_one_is_sealed(tmp_path, monkeypatch):
    """Sealing is held up: until it is done the only whole step stays, even where one is to be kept."""
    sealed, go = checkpoints_module._seal, threading.Event()
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        checkpoints.save(1, learner(1), None, {})
        checkpoints.wait()
        monkeypatch.setattr(checkpoints_module, "_seal", lambda folder: (go.wait(60), sealed(folder)))
        checkpoints.save(2, learner(2), None, {})
        assert damage(tmp_path / "1") is None and damage(tmp_path / "2") == UNFINISHED
        go.set()
        checkpoints.wait()
        assert damage(tmp_path / "2") is None and not (tmp_path / "1").exists()


def test_what_is_donated_while_it_is_being_saved_is_saved_as_it_was(tmp_path):
    overwrite = jax.jit(lambda tree: jax.tree.map(lambda x: -x - 1, tree), donate_argnums=0)
    state = {"w": jax.random.normal(jax.random.key(0), (1 << 21,))}
    kept = np.array(jax.random.normal(jax.random.key(0), (1 << 21,)))
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state, None, {})
        for _ in range(4):
            state = overwrite(state)
        found, _ = checkpoints.restore(1, state, None)
    assert np.asarray(found["w"]).tobytes() == kept.tobytes()


def test_a_step_that_could_not_be_written_is_told_by_the_next_call(tmp_path, monkeypatch):
    def full(folder):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoints_module, "_seal", full)
    with pytest.raises(CheckpointError, match="checkpoint 3 in .* could not be written: .*No space left"):
        with Checkpoints(tmp_path) as checkpoints:
            checkpoints.save(3, learner(0), None, {})


# A tree over all devices of all processes; what it holds depends on neither.
TREE = """
import sys
import jax, numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from glm_jax.io.checkpoints import Checkpoints, abstract
mesh = jax.make_mesh((jax.device_count() // 2, 2), ("fsdp", "tensor"))
def tree(make):
    specs = {"w": ((48, 6), ("fsdp", "tensor")), "v": ((8,), ("tensor",)), "s": ((), ())}
    place = {name: NamedSharding(mesh, PartitionSpec(*spec)) for name, (_, spec) in specs.items()}
    return {name: make(shape, place[name]) for name, (shape, _) in specs.items()}
def number(shape, sharding):
    whole = np.arange(int(np.prod(shape)), dtype=np.float32).reshape(shape) + len(shape)
    return jax.make_array_from_callback(shape, sharding, lambda index: whole[index])
"""
SAVE = (
    TREE
    + """
with Checkpoints(sys.argv[1]) as checkpoints:
    checkpoints.save(5, tree(number), None, {"step": 5})
print("saved")
"""
)
RESTORE = (
    TREE
    + """
with Checkpoints(sys.argv[1]) as checkpoints:
    step, host = checkpoints.newest()
    found, _ = checkpoints.restore(step, abstract(tree(number)), None)
same = [x.sharding == y.sharding and all(np.array_equal(a.data, b.data) for a, b in
        zip(x.addressable_shards, y.addressable_shards)) for x, y in zip(*map(jax.tree.leaves, (found, tree(number))))]
print(step, host["step"], all(same), len(same))
"""
)


more = pytest.mark.scale


@pytest.mark.parametrize(
    ("savers", "restorers"),
    [((2, 2), (1, 8)), pytest.param((1, 8), (2, 4), marks=more), pytest.param((2, 1), (3, 2), marks=more)],
)
def test_another_number_of_processes_restores_onto_its_own_mesh(tmp_path, savers, restorers):
    """(processes, devices of each) that save, and that restore."""
    assert run_together(SAVE, *savers, str(tmp_path)) == ["saved"] * savers[0]
    assert run_together(RESTORE, *restorers, str(tmp_path)) == ["5 5 True 3"] * restorers[0]


def files(step):
    return sorted(path for path in step.rglob("*") if path.is_file())


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def cut(path):
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize("harm", [flip, cut, lambda path: path.unlink()])
def test_a_step_with_any_file_damaged_is_skipped_by_name(folder, harm, caplog):
    for number in range(len(files(folder / "6"))):
        shutil.copytree(folder, folder.parent / "again", dirs_exist_ok=False)
        again = folder.parent / "again"
        path = files(again / "6")[number]
        harm(path)
        caplog.clear()
        with Checkpoints(again, keep=3) as checkpoints:
            step, _ = checkpoints.newest()
            assert step == 4, f"{path} was harmed and nothing noticed"
            assert "checkpoint 6 is damaged" in caplog.text
            if number == 0:
                checkpoints.save(6, learner(7), None, {"step": 6})
                assert checkpoints.newest()[0] == 6
        shutil.rmtree(again)
        for aside in folder.parent.glob("damaged-*"):
            shutil.rmtree(aside)


def test_a_step_that_was_never_sealed_is_skipped(folder, caplog):
    (folder / "6" / SEAL).unlink()
    with Checkpoints(folder) as checkpoints:
        assert checkpoints.newest()[0] == 4
    assert "it was not finished" in caplog.text


def test_no_whole_step_at_all_is_an_error_and_no_step_is_a_start(folder, tmp_path):
    for step in (2, 4, 6):
        (folder / str(step) / SEAL).unlink()
    with Checkpoints(folder) as checkpoints:
        with pytest.raises(CheckpointError, match=r"none of the checkpoints \[6, 4, 2\]"):
            checkpoints.newest()
    with Checkpoints(tmp_path / "empty") as checkpoints:
        assert checkpoints.newest() is None


def test_a_first_save_that_was_cut_off_is_a_start(tmp_path, caplog):
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(2, learner(0), None, {"step": 2})
    (tmp_path / "2" / SEAL).unlink()
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.newest() is None
        assert "checkpoint 2 is damaged (it was not finished)" in caplog.text
        checkpoints.save(2, learner(1), None, {"step": 2})
        assert checkpoints.newest()[0] == 2
