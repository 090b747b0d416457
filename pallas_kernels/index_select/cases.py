"""The shapes that index_select is judged at: a chunk of a prompt against all keys before it."""

from __future__ import annotations

from pallas_kernels.compile.case import Case
from pallas_kernels.compile.schedule import Loop, runs
from pallas_kernels.index_select.tpu import TILE, TOGETHER, query_block
from pallas_kernels.index_select.tpu_select import LANES, SLOT_REGISTERS, SNAP, SPAN

HEADS, WIDTH, TOP_K = 32, 128, 2048
PASSES = 8  # over the ranks until each of eight queries has its threshold: simulated, random scores of 128k keys
SPREAD = 66  # slots by which eight such queries differ in what they have chosen up to the same key


def selection(keys: int) -> list[float]:
    """How often the loops of `tpu_select.select` run, beyond their trips; ties are not charged for."""
    counting, snapping = SNAP - 1, PASSES - (SNAP - 1)
    per_turn = LANES * SLOT_REGISTERS
    spans = 1 + (per_turn + SPREAD) * keys / SPAN / TOP_K  # that hold what a turn's slots choose
    sample, ties, pack, reach, slots = [1], [0, 0, 0, 0], [1], [1], [1, spans]
    return [*sample, counting, counting, snapping, snapping, *ties, *pack, *reach, *slots]


def prefill(queries: int, keys: int) -> Case:
    def build():
        import jax
        import jax.numpy as jnp

        from pallas_kernels.index_select import index_select

        def kernel(q, w, k, first, last):
            return index_select(q, w, k, first, last, TOP_K, backend="tpu")

        def xla(q, w, k, first, last):
            """The scores alone, which XLA fuses into one loop; a selection would come on top."""
            dots = jax.nn.relu(jnp.einsum("bsjx,btx->bsjt", q, k, preferred_element_type=jnp.float32))
            return jnp.einsum("bsjt,bsj->bst", dots, w)

        row = ((1, queries), jnp.int32)
        q, w = ((1, queries, HEADS, WIDTH), jnp.bfloat16), ((1, queries, HEADS), jnp.float32)
        return kernel, xla, [q, w, ((1, keys, WIDTH), jnp.bfloat16), row, row]

    # A loop of one trip, where one product serves all queries of a block, is no loop in the schedule.
    block = query_block(queries, keys)
    scoring = 1 if block <= TOGETHER else 2

    def times(found: list[Loop]) -> list[int]:
        """The first loop walks the keys of every block of queries; what follows the scoring runs at the last step."""
        counted = runs(found)
        extra = selection(keys) if block == 8 else [1, *selection(keys)]  # a loop over eights of queries
        chosen = found[scoring:]
        if len(chosen) != len(extra):
            raise ValueError(f"the schedule has {len(chosen)} loops of selection, expected {len(extra)}: {chosen}")
        groups = counted[0] * TILE / keys * block / 8  # that one core selects for
        return counted[:scoring] + [
            round(groups * often * (loop.trips or 1)) for loop, often in zip(chosen, extra, strict=True)
        ]

    def shares(floor: float, spent: list[int]) -> dict[str, float]:
        """Scoring is held to the matrix units' floor; what selection adds, to scoring."""
        scored = sum(spent[:scoring])
        return {"matrix_share": floor / max(scored, floor), "selection_share": sum(spent[scoring:]) / scored}

    used = queries * keys * HEADS * WIDTH
    moved = 2 * (queries * HEADS * WIDTH + keys * WIDTH) + 4 * queries * (HEADS + TOP_K)
    return Case("index_select", f"{queries} queries x {keys // 1024}k keys", used, moved, build, times, shares)


CASES = {"select_prefill_128k": prefill(1024, 1 << 17), "select_prefill_1m": prefill(64, 1 << 20)}
