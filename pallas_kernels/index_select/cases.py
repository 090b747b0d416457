"""The shapes that index_select is judged at: a chunk of a prompt against all keys before it, and decode."""

from __future__ import annotations

from pallas_kernels.compile.case import Case
from pallas_kernels.compile.schedule import Loop, runs
from pallas_kernels.gpu import sharers
from pallas_kernels.index_select import tpu_decode
from pallas_kernels.index_select.gpu import LEAST
from pallas_kernels.index_select.tpu import TOGETHER, key_tile, query_block
from pallas_kernels.index_select.tpu_select import LANES, REACH_SPANS, ROWS, SLOT_REGISTERS, SPAN

HEADS, WIDTH, TOP_K = 32, 128, 2048
IN = {16: "", 8: " in float8"}
COUNTING, SNAPPING = 10.2, 0.2  # passes until each of eight queries has its threshold: simulated, 128k random scores
SPREAD = 66  # slots by which eight such queries differ in what they have chosen up to the same key


def selection(keys: int) -> list[float]:
    """How often each loop of one `tpu_select.select` runs, in order; ties are not charged for."""
    spans = keys // SPAN
    turns, per_turn = TOP_K // (LANES * SLOT_REGISTERS), LANES * SLOT_REGISTERS
    per_slots = 1 + (per_turn + SPREAD) * spans / TOP_K  # spans that hold what a turn's slots choose
    ties = [0, 0, 0, 0]
    threshold = [spans, COUNTING, COUNTING * spans, SNAPPING, SNAPPING * spans, *ties]
    return [*threshold, spans, spans / REACH_SPANS, turns, turns * per_slots]


def shares_of(scoring: int):
    """Scoring, the first loops, is held to the matrix units' floor; what selection adds, to scoring."""

    def shares(floor: float, spent: list[int]) -> dict[str, float]:
        scored = sum(spent[:scoring])
        return {"matrix_share": floor / max(scored, floor), "selection_share": sum(spent[scoring:]) / scored}

    return shares


def scores(q, w, k, scale=None):
    """The scores alone, which XLA fuses into one loop; a selection would come on top."""
    from pallas_kernels.index_select import reference

    found = reference.scores(q, w, k)
    return found if scale is None else found * scale[:, None]


def shapes_of(bits: int, q: tuple, k: tuple) -> tuple[list, list, list]:
    """q and w, the keys, and their scales where they have some."""
    import jax.numpy as jnp

    kind = {16: jnp.bfloat16, 8: jnp.float8_e4m3fn}[bits]
    return [(q, kind), (q[:-1], jnp.float32)], [(k, kind)], [(k[:-1], jnp.float32)] if bits == 8 else []


def key_bytes(bits: int) -> int:
    return WIDTH * bits // 8 + (4 if bits == 8 else 0)


def queues(queries: int, blocks: int, keys: int) -> int:
    """Bytes of candidates on a GPU: a queue of 2 k and the k that stay, rank and key of each, of every program."""
    return queries * sharers(blocks, keys, LEAST) * 3 * TOP_K * 8 + (8 << 20)


def prefill(queries: int, keys: int, bits: int = 16, xla_selects: bool = False) -> Case:
    """`xla_selects`: its formulation ends in `lax.top_k`, a full sort, rather than in scores."""

    def build(backend: str):
        import jax
        import jax.numpy as jnp

        from pallas_kernels.index_select import index_select

        def kernel(q, w, k, first, last, *scale):
            return index_select(q, w, k, first, last, TOP_K, *scale, backend=backend)

        def xla(q, w, k, first, last, *scale):
            found = scores(q, w, k, *scale)
            if not xla_selects:
                return found
            column = jnp.arange(keys)
            seen = (first[..., None] <= column) & (column < last[..., None])
            best = jax.lax.top_k(jnp.where(seen, found, -jnp.inf), TOP_K)[1]
            return jnp.sort(best, axis=-1), jnp.minimum(last - first, TOP_K)

        row = ((1, queries), jnp.int32)
        q, k, scale = shapes_of(bits, (1, queries, HEADS, WIDTH), (1, keys, WIDTH))
        return kernel, xla, [*q, *k, row, row, *scale]

    # A loop of one trip, where one product serves all queries of a block, is no loop in the schedule.
    block = query_block(queries, keys)
    scoring = 1 if block <= TOGETHER else 2

    def times(found: list[Loop]) -> list[int]:
        """The first loop walks the keys of every block of queries; what follows the scoring runs at the last step."""
        counted = runs(found)
        groups = counted[0] * key_tile(keys) / keys * block / ROWS  # that one core selects for
        eights = [] if block == ROWS else [1]
        often = [round(groups * each) for each in [*eights, *selection(keys)]]
        return counted[:scoring] + often

    used = queries * keys * HEADS * WIDTH
    moved = keys * key_bytes(bits) + queries * (HEADS * WIDTH * bits // 8 + 4 * HEADS + 4 * TOP_K)
    shape = f"{queries} queries x {keys // 1024}k keys{IN[bits]}" + xla_selects * ", XLA selects too"
    temporary = {"gpu": queues(queries, -(-queries // 4), keys)}
    return Case("index_select", shape, used, moved, build, times, shares_of(scoring), temporary, float8=bits == 8)


def decode(batch: int, queries: int, keys: int, page: int, bits: int = 16) -> Case:
    def build(backend: str):
        import jax.numpy as jnp

        from pallas_kernels.index_select import index_select_paged

        def kernel(q, w, pages, table, first, last, *scale):
            return index_select_paged(q, w, pages, table, first, last, TOP_K, *scale, backend=backend)

        def xla(q, w, pages, table, first, last, *scale):
            in_order = lambda a: a[table].reshape(batch, keys, *a.shape[2:])
            return scores(q, w, in_order(pages), *map(in_order, scale))

        row, table = ((batch, queries), jnp.int32), ((batch, keys // page), jnp.int32)
        q, pages, scale = shapes_of(bits, (batch, queries, HEADS, WIDTH), (batch * keys // page, page, WIDTH))
        return kernel, xla, [*q, *pages, table, row, row, *scale]

    share = ROWS // queries  # sequences per step

    def times(found: list[Loop]) -> list[int]:
        """Steps, first copies, what is not visible, sequences, tiles (with copies, then without), the selection."""
        tiles, steps = keys // tpu_decode.TILE, found[0].trips - 2  # of a grid the schedule counts two more
        scoring = [found[0].trips / steps, 0, tiles, share, share * tiles, 0]
        return [round(steps * each) for each in [*scoring, *selection(keys)]]

    used = batch * queries * keys * HEADS * WIDTH
    moved = batch * (keys * key_bytes(bits) + queries * (HEADS * WIDTH * bits // 8 + 4 * HEADS + 4 * TOP_K))
    shape = f"{batch} x {queries} {'query' if queries == 1 else 'queries'} x {keys // 1024}k paged keys{IN[bits]}"
    temporary = {"gpu": queues(batch * queries, batch, keys)}
    return Case("index_select_paged", shape, used, moved, build, times, shares_of(6), temporary, float8=bits == 8)


CASES = {
    "select_prefill_128k": prefill(1024, 1 << 17),
    "select_prefill_1m": prefill(64, 1 << 20),
    "select_prefill_whole": prefill(128, 1 << 17, xla_selects=True),
    "select_prefill_float8_128k": prefill(1024, 1 << 17, bits=8),
    "select_decode_128k": decode(64, 1, 1 << 17, 128),
    "select_decode_4_128k": decode(64, 4, 1 << 17, 128),
    "select_decode_float8_128k": decode(64, 1, 1 << 17, 128, bits=8),
}
