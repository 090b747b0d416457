"""Hugging Face model folders: `config.json` and safetensors in the public layout, read and written."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import re
import shutil
from pathlib import Path

import jax
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from glm_jax.io import layout
from glm_jax.io.layout import Entry
from glm_jax.model import tree, weights
from glm_jax.model.config import ModelConfig, from_hf, to_hf
from glm_jax.model.weights import Transformer

SHARD_BYTES = 5 << 30
_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"


class CheckpointError(ValueError):
    """A model folder that cannot be read as what its config says."""


def load(path: str | os.PathLike, dtype: str | None = None) -> tuple[ModelConfig, Transformer]:
    """Reads a model folder. `dtype` overrides the config's; router and its bias stay float32.

    Raises:
        CheckpointError: naming every missing, unexpected and misshapen tensor at once; nothing is half-loaded.
    """
    folder = Path(path)
    config = read_config(folder)
    if dtype is not None:
        config = dataclasses.replace(config, dtype=dtype)
    reader = _Reader(folder)
    entries = layout.entries(config)
    _check(folder, config, entries, reader)
    leaves = weights.abstract(config)

    def read(entry: Entry, leaf: tree.Leaf) -> np.ndarray:
        return np.ascontiguousarray(entry.join([reader.get(n) for n in entry.names])).astype(leaf.dtype or config.dtype)

    layers = entries.groups[0]
    groups = []
    for group, declared in zip(config.groups, leaves.groups, strict=True):
        step = len(group.pattern)
        rows = []
        for i, leaf_layer in enumerate(declared):
            numbers = range(group.first + i, group.first + step * group.repeats, step)
            made = [_map(read, layers[n], leaf_layer) for n in numbers]
            rows.append(made[0] if group.repeats == 1 else jax.tree.map(lambda *a: np.stack(a), *made))
        groups.append(tuple(rows))
    rest = {k: _map(read, getattr(entries, k), getattr(leaves, k)) for k in ("embed", "norm", "head")}
    params = Transformer(groups=tuple(groups), value=None, **rest)
    return config, jax.tree.map(jax.numpy.asarray, params)


def save(path: str | os.PathLike, config: ModelConfig, params: Transformer, shard_bytes: int = SHARD_BYTES) -> None:
    """Writes a model folder that transformers and `load` read. Appears whole or not at all.

    A model that stood there is replaced, other files stay.
    """
    folder = Path(path)
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)  # of a save that was interrupted
    partial.mkdir(parents=True)
    tensors = dict(_file_tensors(config, jax.device_get(params)))
    shards: list[dict[str, np.ndarray]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        if shards[-1] and size + tensor.nbytes > shard_bytes:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += tensor.nbytes
    names = [f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))]
    if len(shards) == 1:
        names = [_SINGLE]
    else:
        index = {
            "metadata": {"total_size": sum(t.nbytes for t in tensors.values())},
            "weight_map": {k: name for name, shard in zip(names, shards, strict=True) for k in shard},
        }
        (partial / _INDEX).write_text(json.dumps(index, indent=2))
    for name, shard in zip(names, shards, strict=True):
        save_file(shard, partial / name, metadata={"format": "pt"})
    (partial / "config.json").write_text(json.dumps(to_hf(config), indent=2) + "\n")
    folder.mkdir(parents=True, exist_ok=True)
    # The old config goes first and the new one comes last: a folder without one is no model.
    for file in ("config.json", _INDEX, _SINGLE, *(f.name for f in folder.glob("model-*-of-*.safetensors"))):
        (folder / file).unlink(missing_ok=True)
    for file in sorted(partial.iterdir(), key=lambda f: f.name == "config.json"):
        os.replace(file, folder / file.name)
    partial.rmdir()


def read_config(folder: Path) -> ModelConfig:
    file = folder / "config.json"
    if not file.is_file():
        raise CheckpointError(f"{folder} holds no config.json: give the folder of a Hugging Face model")
    return from_hf(_read_json(file))


def _read_json(file: Path) -> dict:
    try:
        value = json.loads(file.read_text())
    except ValueError as error:
        raise CheckpointError(f"{file} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{file} holds a {type(value).__name__}, not an object")
    return value


def _map(f, entries, leaves):
    return jax.tree.map(f, entries, leaves, is_leaf=lambda x: isinstance(x, Entry))


def _all_entries(entries) -> list[Entry]:
    return jax.tree.leaves(entries, is_leaf=lambda x: isinstance(x, Entry))


def _check(folder: Path, config: ModelConfig, entries: Transformer, reader: _Reader) -> None:
    want = {n: s for e in _all_entries(entries) for n, s in zip(e.names, e.shapes, strict=True)}
    have = reader.shapes()
    ours = {n for n in have if not _ignored(n, config)}
    if skipped := len(have) - len(ours):
        logging.info("%s: %d tensors of the draft (MTP) layer and rotary buffers are not read", folder, skipped)
    problems = [f"missing {n} {want[n]}" for n in sorted(want.keys() - have.keys())]
    problems += [f"unexpected {n} {have[n]}" for n in sorted(ours - want.keys())]
    problems += [
        f"misshapen {n}: {have[n]} in the file, {want[n]} by the config"
        for n in sorted(want.keys() & have.keys())
        if have[n] != want[n]
    ]
    if problems:
        raise CheckpointError(
            f"{folder}: {len(problems)} tensors do not fit its config.json:\n  " + "\n  ".join(problems)
        )


def _ignored(name: str, config: ModelConfig) -> bool:
    match = re.match(r"model\.layers\.(\d+)\.", name)
    return name.endswith("rotary_emb.inv_freq") or (match is not None and int(match[1]) == config.num_hidden_layers)


class _Reader:
    """The tensors of a folder by name, one file or sharded with an index."""

    def __init__(self, folder: Path):
        self._handles = {}
        if (folder / _INDEX).is_file():
            weight_map = _read_json(folder / _INDEX).get("weight_map")
            if not isinstance(weight_map, dict):
                raise CheckpointError(f"{folder / _INDEX} has no weight_map from tensor names to files")
            files = sorted(set(weight_map.values()))
        else:
            files = [_SINGLE]
        if absent := [f for f in files if not (folder / f).is_file()]:
            raise CheckpointError(f"{folder} lacks {', '.join(absent)}")
        for file in files:
            try:
                handle = safe_open(folder / file, framework="flax")
            except SafetensorError as error:
                raise CheckpointError(f"{folder / file} is damaged or truncated: {error}") from None
            self._handles.update(dict.fromkeys(handle.keys(), handle))

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {n: tuple(h.get_slice(n).get_shape()) for n, h in self._handles.items()}

    def get(self, name: str) -> np.ndarray:
        return np.asarray(self._handles[name].get_tensor(name))


def _file_tensors(config: ModelConfig, params: Transformer):
    """(name, tensor) of every file tensor, in layer order."""
    entries = layout.entries(config)
    for key in ("embed", "norm", "head"):
        if (entry := getattr(entries, key)) is not None:
            yield entry.names[0], _contiguous(entry.split(getattr(params, key))[0])
    flat = weights.unstack(params, config)
    layers = [layer for group in flat.groups for layer in group]
    for entry_layer, layer in zip(entries.groups[0], layers, strict=True):
        attn = layer.attn
        yield entry_layer.attn.k_b.names[0], _contiguous(layout.merge_kv(attn.k_b, attn.v_b))
        pairs = zip(_all_entries(entry_layer), jax.tree.leaves(layer), strict=True)
        for entry, value in pairs:
            if entry.names != entry_layer.attn.k_b.names:
                for name, tensor in zip(entry.names, entry.split(value), strict=True):
                    yield name, _contiguous(tensor)


def _contiguous(tensor: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(tensor)
