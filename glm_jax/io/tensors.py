"""The tensors of a folder of safetensors by name, one file or sharded with an index, read one at a time."""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from glm_jax.io.folder import INDEX, CheckpointError, files
from glm_jax.model.quantised import BLOCK

FP8 = "F8_E4M3"  # w = fp8 · scale, one scale per BLOCK x BLOCK
SCALE = "_scale_inv"  # of a scale's name, as released; it multiplies all the same
SCALE_NAMES = (SCALE, "_scale")
WIDE = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}
WEIGHTS = {**WIDE, FP8: ml_dtypes.float8_e4m3fn}
SCALES = {**WIDE, "F8_E8M0": ml_dtypes.float8_e8m0fnu}  # UE8M0: the exponent alone, a power of two
AT_ONCE = 1 << 22  # numbers that are compared at a time


class Tensors:
    """What the files say of each tensor, and its values on demand; nothing is held in memory between two reads."""

    def __init__(self, folder: Path):
        self._at: dict[str, tuple[Path, int]] = {}  # file, and where in it
        self.shape: dict[str, tuple[int, ...]] = {}
        self.dtype: dict[str, str] = {}
        lacking: list[str] = []
        for path, names in files(folder).items():
            start, header = _header(path)
            for name in header if names is None else names:
                if (about := header.get(name)) is None:
                    lacking.append(f"{name} is not in {path.name}")
                    continue
                self.shape[name], self.dtype[name] = tuple(about["shape"]), about["dtype"]
                self._at[name] = path, start + about["data_offsets"][0]
        if lacking:
            told = "\n  ".join(sorted(lacking))
            raise CheckpointError(f"{folder / INDEX} is wrong about {len(lacking)} tensors:\n  {told}")

    def get(self, name: str) -> np.ndarray:
        """A tensor in the dtype of its file; FP8 is scaled to float32. Raises CheckpointError for NaN or infinity."""
        if self.dtype[name] == FP8:
            value, scale = self.get_fp8(name)
            return value.astype(np.float32) * scale
        return self._read(name)

    def get_fp8(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """An FP8 matrix, and its scales spread over its entries. Raises CheckpointError for NaN or infinity."""
        (rows, columns), scale = self.shape[name], self._read(self.scale_name(name)).astype(np.float32)
        return self._read(name), np.repeat(np.repeat(scale, BLOCK, axis=0)[:rows], BLOCK, axis=1)[:, :columns]

    def scale_name(self, name: str) -> str:
        """Of an FP8 tensor's scales; the released name where the files have none."""
        return next((name + ending for ending in SCALE_NAMES if name + ending in self.shape), name + SCALE)

    def same(self, one: str, other: str) -> bool:
        """Whether two tensors hold the same values, in whatever dtypes; an FP8 one, which has scales, does not."""
        if self.shape[one] != self.shape[other] or any(self.dtype[n] not in WIDE for n in (one, other)):
            return False
        size = math.prod(self.shape[one])
        pieces = ((first, min(AT_ONCE, size - first)) for first in range(0, size, AT_ONCE))
        wide = lambda name, piece: self._values(name, *piece).astype(np.float64)
        return all(np.array_equal(wide(one, piece), wide(other, piece)) for piece in pieces)

    def _read(self, name: str) -> np.ndarray:
        value = self._values(name, 0, math.prod(self.shape[name])).reshape(self.shape[name])
        if not np.isfinite(value).all():
            raise CheckpointError(f"{self._at[name][0]}: {name} holds NaN or infinity")
        return value

    def _values(self, name: str, first: int, count: int) -> np.ndarray:
        """Read, not mapped: pages of a mapped file would count as this process's memory for as long as it is open."""
        path, start = self._at[name]
        dtype = np.dtype({**WEIGHTS, **SCALES}[self.dtype[name]])
        with path.open("rb") as file:
            file.seek(start + first * dtype.itemsize)
            return np.fromfile(file, dtype, count)


def scale_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Of the scales of an FP8 tensor."""
    return tuple(-(-size // BLOCK) for size in shape)


def _header(path: Path) -> tuple[int, dict[str, dict]]:
    """Where a file's data begin, and what its header says of each tensor; the library checks that they fit the file."""
    try:
        with safe_open(path, framework="numpy"):
            pass
    except SafetensorError as error:
        raise CheckpointError(f"{path} is damaged or truncated: {error}") from None
    with path.open("rb") as file:
        (size,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(size))
    header.pop("__metadata__", None)
    return 8 + size, header
