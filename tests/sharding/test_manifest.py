"""What a handoff moves, against the devices' own accounts, and the checksum of what it hands over."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from glm_jax.model import weights
from glm_jax.sharding import layout
from glm_jax.sharding.checksum import checksum
from glm_jax.sharding.handoff import handoff
from glm_jax.sharding.manifest import abstract, in_place, manifest, moved, stays
from glm_jax.sharding.mesh import MeshConfig, make_mesh
from tests.model.tiny import named_leaves, random_params, staged_layers

CONFIG = staged_layers()


def bounds(sharding, shape):
    """Of every device, (first, end) of each dimension, as jax says."""
    where = sharding.devices_indices_map(shape)
    return {d: [s.indices(n)[:2] for s, n in zip(index, shape, strict=True)] for d, index in where.items()}


@pytest.mark.parametrize(
    "axes",
    [dict(fsdp=2, context=2, expert=2), dict(data=2, expert=2, tensor=2), dict(tensor=2), dict(stage=2, fsdp=2), {}],
)
def test_bytes_that_stay_are_those_in_both_shards_of_a_device(axes):
    config = MeshConfig(**axes)
    mesh, entries = make_mesh(config), manifest(CONFIG, abstract(config))
    learn, sample = (
        named_leaves(layout.shardings(weights.abstract(CONFIG), rules, mesh)) for rules in (layout.LEARN, layout.SAMPLE)
    )
    assert [e.name for e in entries] == list(learn)
    for entry in entries:
        before, after = (bounds(found[entry.name], entry.shape) for found in (learn, sample))
        common = [
            np.prod([max(0, min(a[1], b[1]) - max(a[0], b[0])) for a, b in zip(before[d], after[d], strict=True)])
            for d in before
        ]
        size = jnp.dtype(entry.dtype).itemsize
        assert entry.stays == size * np.mean(common), entry.name
        assert entry.bytes == size * np.prod([b - a for a, b in after[mesh.devices.flat[0]]]), entry.name
        assert bool(entry.axes) == (entry.stays < entry.bytes), entry.name
        assert all(mesh.shape[axis] > 1 for axis in entry.axes)
    held = sum(e.bytes for e in entries)
    assert sum(moved(entries).values()) == pytest.approx(held * (1 - stays(entries)))
    assert (in_place(entries) < 1) == (axes not in ({}, {"tensor": 2}))


def words(arrays) -> np.ndarray:
    return np.concatenate([np.asarray(a).reshape(-1).view(np.uint32) for a in jax.tree.leaves(arrays)])


def by_hand(arrays) -> int:
    w = words(arrays).astype(np.uint64) ^ 0x9E3779B9
    w = (w ^ (w >> np.uint64(16))) * np.uint64(0x7FEB352D) % 2**32
    w = (w ^ (w >> np.uint64(15))) * np.uint64(0x846CA68B) % 2**32
    return int(np.sum(w ^ (w >> np.uint64(16))) % 2**32)


def test_the_checksum_is_that_of_the_words_wherever_they_lie():
    params = random_params(CONFIG)
    want = by_hand(params)
    assert int(checksum(params)) == want
    mesh = make_mesh(MeshConfig(fsdp=2, expert=2, tensor=2))
    split = jax.device_put(params, layout.shardings(weights.abstract(CONFIG), layout.LEARN, mesh))
    sums = jax.jit(lambda p: (checksum(p), checksum(handoff(p, CONFIG, mesh))))
    assert [int(s) for s in sums(split)] == [want, want]


def test_any_bit_of_any_number_changes_the_checksum():
    a = jnp.array([0.0, -1.5, 3e20])
    seen = {int(checksum(a))}
    for bit in range(32):
        for i in range(3):
            flipped = np.asarray(a).view(np.uint32).copy()
            flipped[i] ^= np.uint32(1 << bit)
            seen.add(int(checksum(jnp.asarray(flipped.view(np.float32)))))
    assert len(seen) == 1 + 3 * 32
    half = jnp.array([1.0, 2.0], jnp.bfloat16)
    assert len({int(checksum(x)) for x in (half, half[:1], half.at[0].set(-1), jnp.zeros(3, jnp.bfloat16))}) == 4
