"""The tensors of a folder of safetensors by name, one file or sharded with an index, read one at a time."""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from glm_jax.model.quantised import BLOCK

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
FP8, SCALE = "F8_E4M3", "_scale_inv"  # w = fp8 · scale, one float32 scale per BLOCK x BLOCK
FLOATS = ("F64", "F32", "F16", "BF16", FP8)


class CheckpointError(ValueError):
    """A model folder that cannot be read as what its config says."""


class Tensors:
    """What the files say of each tensor, and its values on demand; nothing is held in memory between two reads."""

    def __init__(self, folder: Path):
        self._files: dict[str, Path] = {}
        self.shape: dict[str, tuple[int, ...]] = {}
        self.dtype: dict[str, str] = {}
        self._open = {}
        for path in _files(folder):
            try:
                handle = safe_open(path, framework="numpy")
            except SafetensorError as error:
                raise CheckpointError(f"{path} is damaged or truncated: {error}") from None
            for name in handle.keys():
                part = handle.get_slice(name)
                self.shape[name], self.dtype[name] = tuple(part.get_shape()), part.get_dtype()
                self._files[name] = path
            self._open[path] = handle

    def get(self, name: str) -> np.ndarray:
        """A tensor in the dtype of its file; FP8 is scaled to float32. Raises CheckpointError for NaN or infinity."""
        if self.dtype[name] == FP8:
            value, scale = self.get_fp8(name)
            return value.astype(np.float32) * scale
        return self._finite(name, self._open[self._files[name]].get_tensor(name))

    def get_fp8(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """An FP8 matrix, and its scales spread over its entries. Raises CheckpointError for NaN or infinity."""
        (rows, columns), scale = self.shape[name], self.get(name + SCALE).astype(np.float32)
        value = self._finite(name, _read_fp8(self._files[name], name, self.shape[name]))
        return value, np.repeat(np.repeat(scale, BLOCK, axis=0)[:rows], BLOCK, axis=1)[:, :columns]

    def _finite(self, name: str, value: np.ndarray) -> np.ndarray:
        if not np.isfinite(value).all():
            raise CheckpointError(f"{self._files[name]}: {name} holds NaN or infinity")
        return value


def read_json(file: Path) -> dict:
    try:
        value = json.loads(file.read_text())
    except ValueError as error:
        raise CheckpointError(f"{file} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{file} holds a {type(value).__name__}, not an object")
    return value


def scale_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Of the scales of an FP8 tensor."""
    return tuple(-(-size // BLOCK) for size in shape)


def _files(folder: Path) -> list[Path]:
    names = [SINGLE]
    if (folder / INDEX).is_file():
        weight_map = read_json(folder / INDEX).get("weight_map")
        if not isinstance(weight_map, dict):
            raise CheckpointError(f"{folder / INDEX} has no weight_map from tensor names to files")
        names = sorted(set(weight_map.values()))
    if absent := [name for name in names if not (folder / name).is_file()]:
        raise CheckpointError(f"{folder} lacks {', '.join(absent)}")
    return [folder / name for name in names]


def _read_fp8(path: Path, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """safetensors' own numpy reader knows no FP8: the bytes lie at the offsets that the file's header gives."""
    with path.open("rb") as file:
        (size,) = struct.unpack("<Q", file.read(8))
        first, _ = json.loads(file.read(size))[name]["data_offsets"]
        file.seek(8 + size + first)
        data = file.read(math.prod(shape))
    return np.frombuffer(data, ml_dtypes.float8_e4m3fn).reshape(shape)
