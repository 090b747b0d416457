"""The shapes that index_select is judged at: a chunk of a prompt against all keys before it."""

from __future__ import annotations

from pallas_kernels.compile.case import Case
from pallas_kernels.compile.schedule import Loop, runs
from pallas_kernels.index_select.tpu import CHUNK, TOGETHER, query_block

HEADS, WIDTH, TOP_K = 32, 128, 2048
PASSES = 25  # counting passes charged for a selection: 22 to 28 for eight queries of random scores at 128k keys
SLOT_LOOPS = 2  # registers of output slots that eight queries touch per chunk of keys


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
    scoring = 1 if query_block(queries, keys) <= TOGETHER else 2

    def times(found: list[Loop]) -> list[int]:
        """The first loop walks the keys of every block of queries; what follows the scoring runs at the last chunk."""
        # The threshold's loops: eight queries at a time, what is visible, bit after bit; ties are not charged for.
        charged = [1, 1, PASSES, PASSES, 0, 0, 0][query_block(queries, keys) == 8 :]
        counted = []
        for position, (loop, nested) in enumerate(zip(found, runs(found), strict=True)):
            after = position - scoring
            if after < 0:
                counted.append(nested)
                continue
            slots = SLOT_LOOPS if loop.trips is None else 1
            counted.append(round(nested * CHUNK / keys * (charged[after] if after < len(charged) else slots)))
        return counted

    def shares(floor: float, spent: list[int]) -> dict[str, float]:
        """Scoring is held to the matrix units' floor; what selection adds, to scoring."""
        scored = sum(spent[:scoring])
        return {"matrix_share": floor / max(scored, floor), "selection_share": sum(spent[scoring:]) / scored}

    used = queries * keys * HEADS * WIDTH
    moved = 2 * (queries * HEADS * WIDTH + keys * WIDTH) + 4 * queries * (HEADS + TOP_K)
    return Case("index_select", f"{queries} queries x {keys // 1024}k keys", used, moved, build, times, shares)


CASES = {"select_prefill_128k": prefill(1024, 1 << 17), "select_prefill_1m": prefill(64, 1 << 20)}
