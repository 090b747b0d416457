"""What is read from compiled programs equals what was written into them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from glm_jax.plan import cost, hlo
from glm_jax.plan.cost import LEARN, ONCE, PREFILL, TICK
from glm_jax.plan.errors import PlanError

AXES = {"data": 2, "expert": 4}


def phases(f, *arguments, micro_batches: int = 1) -> cost.Phases:
    text = jax.jit(f).lower(*arguments).compile().as_text()
    return cost.of_program(hlo.parse(text), AXES, micro_batches)


def test_products_in_loops_count_as_often_as_they_run():
    def f(x, w):
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0] @ w[0]

    found = phases(f, jnp.ones((16, 32)), jnp.ones((5, 32, 32)))
    assert found[ONCE].flops == (5 + 1) * 2 * 16 * 32 * 32


def test_a_program_without_loops_costs_what_xla_says():
    f = lambda x, w: x @ w
    arguments = jnp.ones((64, 256)), jnp.ones((256, 128))
    said = jax.jit(f).lower(*arguments).compile().cost_analysis()
    found = phases(f, *arguments)[ONCE]
    assert found.flops == said["flops"]
    assert found.hbm_bytes == said["bytes accessed"]


def test_loops_of_unknown_length_begin_phases():
    product = lambda x: jnp.tanh(x @ x)

    def repeat(x, body):
        return jax.lax.while_loop(lambda x: jnp.max(x) < 3, body, x)

    def tick(x):
        with jax.named_scope("prefill"):
            x = repeat(x, lambda x: product(product(x)))
        return jax.lax.scan(lambda x, _: (product(x), None), x, None, length=5)[0]

    def f(x, n):
        with jax.named_scope("sample"):
            x = repeat(x, tick)
        x = product(x)
        step = lambda x: jax.lax.fori_loop(0, n, lambda _, x: product(x), product(x))
        with jax.named_scope("learn"):
            return jax.lax.cond(n > 0, step, lambda x: x, x)

    found = phases(f, jnp.ones((8, 8)), jnp.int32(1), micro_batches=3)
    assert {name: c.flops / (2 * 8**3) for name, c in found.items() if c.flops} == {
        TICK: 5,
        PREFILL: 2,
        ONCE: 1,
        LEARN: 1 + 3,  # its loop runs over the micro-batches
    }


@pytest.mark.parametrize(
    ("run", "axes", "kind", "moved"),
    [
        (lambda x: jax.lax.psum(x, "expert"), ("expert",), "all-reduce", 2 * 3 / 4 * 64 * 4),
        (lambda x: jax.lax.psum(x, ("data", "expert")), ("data", "expert"), "all-reduce", 2 * 7 / 8 * 64 * 4),
        (lambda x: jax.lax.all_gather(x, "data"), ("data",), "all-gather", 64 * 4),
        (lambda x: jax.lax.all_to_all(x, "expert", 0, 0, tiled=True), ("expert",), "all-to-all", 3 / 4 * 64 * 4),
        (lambda x: jax.lax.ppermute(x, "data", [(0, 1), (1, 0)]), ("data",), "collective-permute", 64 * 4),
    ],
)  # fmt: skip
def test_collectives_are_told_by_kind_axes_and_the_bytes_that_a_device_sends(run, axes, kind, moved):
    mesh = Mesh(np.asarray(jax.devices()[:8]).reshape(2, 4), tuple(AXES))
    every = PartitionSpec(tuple(AXES))
    x = jax.device_put(jnp.ones((512,)), NamedSharding(mesh, every))
    f = jax.shard_map(lambda x: run(x) * 2, mesh=mesh, in_specs=every, out_specs=every, check_vma=False)
    found = phases(f, x)[ONCE]
    assert found.collectives == {(kind, "+".join(axes)): moved}
    assert found.calls == {(kind, "+".join(axes)): 1}


def test_what_a_loop_takes_slices_of_counts_by_the_slice():
    """A scan over stacked weights reads each once, not the stack as often as it runs."""
    f = lambda x, w: jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0]
    stack = 64 * 128 * 128 * 4
    found = phases(f, jnp.ones((4, 128)), jnp.ones((64, 128, 128)))[ONCE].hbm_bytes
    assert stack <= found < 4 * stack  # a slice is made, then read


TPU = """
HloModule m, is_scheduled=true

%fused (param_0: bf16[4,8,16], param_1: bf16[4,16,32]) -> bf16[4,8,32] {
  %param_0 = bf16[4,8,16]{2,1,0:T(8,128)(2,1)} parameter(0)
  %param_1 = bf16[4,16,32]{2,1,0:T(8,128)(2,1)S(1)} parameter(1)
  ROOT %convolution.1 = bf16[4,8,32]{2,1,0:T(8,128)(2,1)} convolution(%param_0, %param_1), window={size=4 stride=3 pad=0_0 lhs_dilate=4}, dim_labels=0bf_0io->0bf
}

ENTRY %main (a: bf16[4,8,16], b: bf16[4,16,32]) -> bf16[4,8,32] {
  %a = bf16[4,8,16]{2,1,0:T(8,128)(2,1)} parameter(0)
  %b = bf16[4,16,32]{2,1,0:T(8,128)(2,1)S(1)} parameter(1)
  ROOT %fusion = bf16[4,8,32]{2,1,0:T(8,128)(2,1)} fusion(%a, %b), kind=kOutput, calls=%fused, backend_config={"estimated_cycles":"1234"}
}
"""  # noqa: E501


def test_a_tpu_writes_batched_products_as_convolutions_and_what_is_on_chip_moves_no_bytes():
    found = cost.of_program(hlo.parse(TPU), AXES, 1)[ONCE]
    assert found.flops == 4 * 2 * 8 * 16 * 32
    assert found.hbm_bytes == 2 * 4 * 8 * (16 + 32)
    assert found.cycles == 1234


def test_products_that_a_gpu_leaves_to_a_library_are_told_as_uncounted():
    call = '%c = f32[8,8]{1,0} custom-call(%a, %b), custom_call_target="__cublas$lt$matmul"'
    text = TPU.replace("  ROOT %fusion", f"  {call}\n  ROOT %fusion")
    assert cost.of_program(hlo.parse(text), AXES, 1)[ONCE].uncounted == {"cublas"}


def test_groups_are_read_from_lists_and_from_turned_grids():
    assert cost.groups("replica_groups={{0,4},{1,5}}", 8) == [0, 4]
    assert cost.groups("replica_groups=[2,4]<=[8]", 8) == [0, 1, 2, 3]
    assert cost.groups("replica_groups=[4,2]<=[2,4]T(1,0)", 8) == [0, 4]
    assert cost.groups("replica_groups=mesh['a'=1,'b'=2,'c'=4] {'b'}", 8) == [0, 4]
    assert cost.groups("replica_groups=mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'a'}", 8) == [0, 1, 2, 3]
    assert cost.groups("source_target_pairs={{0,0},{1,5}}", 8) == [1, 5]
    with pytest.raises(PlanError, match="groups are written in a way that is not known: replica_groups=else"):
        cost.groups("replica_groups=else", 8)


def test_an_update_in_place_counts_by_what_is_updated():
    def f(x, new, at):
        return jax.lax.fori_loop(0, 8, lambda i, x: x.at[at[i]].set(new * i), x)

    text = (
        jax.jit(f, donate_argnums=0).lower(jnp.ones((4096, 128)), jnp.ones((128,)), jnp.arange(8)).compile().as_text()
    )
    assert cost.of_program(hlo.parse(text), AXES, 1)[ONCE].hbm_bytes < 4096 * 128 * 4


@pytest.mark.parametrize(
    "target, moved",
    [
        ('"tpu_custom_call", backend_config={"custom_call_config":{"cost_estimate":{"bytes_accessed":"48"}}}', 48),
        ('"__gpu$xla.gpu.triton"', 4 * 8),
        ('"Sort"', 4 * (8 + 1000)),
    ],
)
def test_a_kernel_moves_what_it_tells_and_not_all_that_it_picks_rows_from(target, moved):
    text = f"""
ENTRY %main (a: f32[1000]) -> f32[8] {{
  %a = f32[1000]{{0}} parameter(0)
  ROOT %b = f32[8]{{0}} custom-call(%a), custom_call_target={target}
}}
"""
    assert cost.of_program(hlo.parse(text), AXES, 1)[ONCE].hbm_bytes == moved
