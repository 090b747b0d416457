"""Meshes and layouts: where each parameter lies for learning and for sampling, and what cannot be laid out."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from glm_jax.model import selection, weights
from glm_jax.model.config import glm52_744b
from glm_jax.model.tree import Leaf
from glm_jax.sharding import layout, manifest
from glm_jax.sharding.handoff import handoff
from glm_jax.sharding.mesh import LayoutError, MeshConfig, make_mesh
from tests.model.tiny import named_leaves, random_params, staged_layers, three_layers

CONFIG, STAGED = three_layers(), staged_layers()


def specs(rules, mesh) -> dict[str, PartitionSpec]:
    found = named_leaves(layout.shardings(weights.abstract(CONFIG), rules, mesh))
    return {name: sharding.spec for name, sharding in found.items()}


def test_parameters_are_split_over_every_axis_for_learning():
    found = specs(layout.LEARN, make_mesh(MeshConfig(fsdp=2, expert=2, tensor=2)))
    assert found[".embed"] == PartitionSpec(("expert", "tensor"), ("data", "fsdp", "context", "stage"))
    assert found[".groups[0][0].attn.q_b"] == PartitionSpec("expert", "tensor", None)
    everywhere = PartitionSpec(None, "expert", None, None, ("data", "fsdp", "tensor", "context", "stage"))
    assert found[".groups[1][0].mlp.experts.gate_up"] == everywhere
    assert found[".groups[1][0].mlp.router"] == PartitionSpec(None, ("data", "fsdp", "context", "stage"), None)
    assert found[".norm"] == PartitionSpec(None)


def test_layers_in_stages_are_on_one_each_for_learning_and_on_all_for_sampling():
    """Their experts travel within the axis; everything else is split over it as over others, and other experts stay."""
    mesh = make_mesh(MeshConfig(stage=2, fsdp=2, expert=2))
    of = lambda rules: named_leaves(layout.shardings(weights.abstract(STAGED), rules, mesh))
    learn, sample = ({name: s.spec for name, s in of(rules).items()} for rules in (layout.LEARN, layout.SAMPLE))
    experts, router = (f".groups[2][0].mlp.{name}" for name in ("experts.down", "router"))
    assert learn[experts] == PartitionSpec("stage", "expert", ("data", "fsdp", "tensor", "context"), None)
    assert sample[experts] == PartitionSpec(None, "expert", layout.WIDTHS, None)
    assert learn[router] == PartitionSpec("stage", ("data", "fsdp", "context"), None)
    assert learn[".groups[1][0].mlp.experts.down"] == sample[".groups[1][0].mlp.experts.down"]
    assert "stage" in learn[".groups[1][0].mlp.router"][0]
    entries = {e.name: e for e in manifest.manifest(STAGED, mesh)}
    assert entries[experts].axes == ("stage",) and entries[experts].stays == entries[experts].bytes / 2


def test_layers_that_cannot_be_cut_into_stages_are_refused():
    with pytest.raises(LayoutError, match="mesh.stage=2: no run of this model's layers can be cut into stages"):
        layout.check_stages(CONFIG, make_mesh(MeshConfig(stage=2)))
    with pytest.raises(LayoutError, match="mesh.stage=4: layers 2 to 3 are 2 times 1, and 2 does not divide over 4"):
        layout.check_stages(STAGED, make_mesh(MeshConfig(stage=4)))
    layout.check_stages(STAGED, make_mesh(MeshConfig(stage=2)))
    layout.check_stages(CONFIG, make_mesh(MeshConfig(fsdp=2)))


def test_the_handoff_goes_from_one_layout_to_another_and_keeps_every_value():
    mesh = make_mesh(MeshConfig(fsdp=4, tensor=2))
    learn, sample = specs(layout.LEARN, mesh), specs(layout.SAMPLE, mesh)
    moved = {name for name in learn if learn[name] != sample[name]}
    assert {".embed", ".head", ".groups[0][0].attn.q_a", ".groups[1][0].mlp.router"} <= moved
    assert not [n for n in moved if ".experts." in n], "what fills the memory stays where it is"
    params = jax.device_put(random_params(CONFIG), layout.shardings(weights.abstract(CONFIG), layout.LEARN, mesh))
    view = jax.jit(lambda p: handoff(p, CONFIG, mesh))(params)
    assert params.embed.sharding.shard_shape((64, 32)) == (32, 8)
    assert view.embed.sharding.shard_shape((64, 32)) == (32, 32)
    want = weights.for_decoding(random_params(CONFIG), CONFIG)
    assert jax.tree.structure(view) == jax.tree.structure(want) and len(view.groups) == 3
    for a, b in zip(jax.tree.leaves(view), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("axes", [("fsdp", None), (None, "fsdp"), ("data", "fsdp")])
def test_equal_scores_select_the_same_keys_on_one_and_on_eight_devices(axes):
    """Queries split, keys split, and both: ties go to the lower column wherever it lies."""
    score = np.random.default_rng(0).integers(0, 3, (16, 64)).astype(np.float32)
    score[:8] = 0.0
    visible = np.tril(np.ones((64, 64), bool))[-16:]
    choose = jax.jit(lambda s, v: selection.indices(selection.select(s, v, 5), 5))
    want = choose(score, visible)
    mesh = make_mesh(MeshConfig(fsdp=4, data=2))
    split = jax.device_put((score, visible), NamedSharding(mesh, PartitionSpec(*axes)))
    for got, one in zip(choose(*split), want, strict=True):
        np.testing.assert_array_equal(got, one)
    np.testing.assert_array_equal(want[0][:8], np.tile(np.arange(5), (8, 1)))


@pytest.mark.parametrize("axes", [dict(expert=4, tensor=2), dict(expert=2, fsdp=4), dict(data=2, expert=2, fsdp=2)])
def test_experts_stay_on_their_devices(axes):
    mesh = make_mesh(MeshConfig(**axes))
    learn, sample = specs(layout.LEARN, mesh), specs(layout.SAMPLE, mesh)
    shape = {name: leaf.shape for name, leaf in named_leaves(random_params(CONFIG)).items()}
    for name in (n for n in learn if ".experts." in n):
        parts = [jax.sharding.NamedSharding(mesh, s[name]).shard_shape(shape[name]) for s in (learn, sample)]
        assert parts[0] == parts[1] and learn[name] == sample[name]


def test_the_released_model_lies_on_meshes_of_eight():
    leaves = weights.abstract(glm52_744b())
    meshes = [dict(fsdp=8), dict(expert=8), dict(data=2, expert=2, tensor=2)]
    for axes in (*meshes, dict(expert=2, context=4), dict(stage=2, expert=4)):
        for rules in (layout.LEARN, layout.SAMPLE):
            assert layout.shardings(leaves, rules, make_mesh(MeshConfig(**axes)))


def test_a_dimension_that_does_not_divide_is_named_with_its_size():
    leaves = weights.abstract(three_layers(n_routed_experts=6))
    with pytest.raises(LayoutError, match=r"mlp.*dimension of 6 that does not divide over expert \(4 devices\)"):
        layout.shardings(leaves, layout.LEARN, make_mesh(MeshConfig(expert=4)))
    with pytest.raises(LayoutError, match=r"\.embed has a dimension of 63 .* \(2 devices\)"):
        layout.shardings(weights.abstract(three_layers(vocab_size=63)), layout.LEARN, make_mesh(MeshConfig(tensor=2)))


def test_two_dimensions_of_one_leaf_never_claim_one_mesh_axis():
    leaf = {"w": Leaf((4, 4), ("head", "mlp"), fan_in=4)}
    with pytest.raises(LayoutError, match=r"\['w'\].*claim one mesh axis twice"):
        layout.shardings(leaf, layout.LEARN, make_mesh(MeshConfig(tensor=2)))


def test_rows_are_split_over_all_axes_but_tensor_and_context_and_slots_also_over_context():
    config = MeshConfig(stage=2, expert=2, context=2)
    mesh = make_mesh(config)
    for ways, split, shape in ((config.rows, layout.rows, (3, 4, 5)), (config.slots, layout.slots, (3, 2, 5))):
        array = jax.device_put(jnp.zeros((3, 16, 5)), split(mesh, 1))
        assert array.sharding.shard_shape(array.shape) == shape and 16 // ways == shape[1]


def test_a_mesh_of_more_devices_than_there_are_is_refused_by_its_axes():
    with pytest.raises(LayoutError, match=r"the mesh \(fsdp 8 × tensor 2\) needs 16 devices, 8 are there"):
        make_mesh(MeshConfig(fsdp=8, tensor=2))
    for axis in ("context", "stage"):
        with pytest.raises(LayoutError, match=f"tensor=2 with {axis}=4: .* set one of them to 1"):
            make_mesh(MeshConfig(**{"tensor": 2, axis: 4}))
    assert MeshConfig(data=0, tensor=-1).check() == ["data=0 must be at least 1", "tensor=-1 must be at least 1"]
