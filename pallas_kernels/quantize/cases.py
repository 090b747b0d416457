"""The shapes that quantisation is judged at: activations, the index keys of a context, one expert's weight."""

from __future__ import annotations

from pallas_kernels.compile.case import Case

BLOCK = 128


def rows(rows: int, width: int, rotate: bool) -> Case:
    def build(backend: str):
        import jax.numpy as jnp

        from pallas_kernels.quantize import quantize_rows

        kernel, xla = (lambda x, b=b: quantize_rows(x, rotate=rotate, backend=b) for b in (backend, "xla"))
        return kernel, xla, [((rows, width), jnp.bfloat16)]

    used = rows * width * BLOCK * rotate
    return _case("quantize_rows", f"{rows} x {width}", used, _moved(rows * width, BLOCK), build)


def blocks(rows: int, columns: int) -> Case:
    def build(backend: str):
        import jax.numpy as jnp

        from pallas_kernels.quantize import quantize_blocks

        kernel, xla = (lambda w, b=b: quantize_blocks(w, backend=b) for b in (backend, "xla"))
        return kernel, xla, [((rows, columns), jnp.bfloat16)]

    return _case("quantize_blocks", f"{rows} x {columns}", 0, _moved(rows * columns, BLOCK**2), build)


def _moved(entries: int, per_scale: int) -> int:
    """bfloat16 in, FP8 and float32 scales out."""
    return 3 * entries + 4 * entries // per_scale


def _case(*what) -> Case:
    """Bytes are the bound here, not the matrix units."""
    return Case(*what, shares=lambda floor, spent: {}, float8=True)


CASES = {
    "quantize_activations": rows(4096, 6144, rotate=False),
    "quantize_index_keys": rows(1 << 17, BLOCK, rotate=True),
    "quantize_expert": blocks(2048, 6144),
}
