"""Hugging Face model folders: `config.json` and safetensors in the public layout, read and written."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import jax
import numpy as np
from jax.experimental.multihost_utils import process_allgather
from jax.sharding import NamedSharding, PartitionSpec
from safetensors.numpy import save_file

from glm_jax.io import fit, layout
from glm_jax.io.folder import INDEX, SINGLE, CheckpointError, read_json
from glm_jax.io.layout import Entry
from glm_jax.io.tensors import FP8, SCALE, Tensors
from glm_jax.model import tree, weights
from glm_jax.model.config import ModelConfig
from glm_jax.model.hf_config import from_hf, to_hf
from glm_jax.model.quantised import BLOCK, Quantised
from glm_jax.model.weights import Layer, Transformer

logger = logging.getLogger(__name__)

SHARD_BYTES = 5 << 30
FP8_CONFIG = {  # what engines want to read in config.json beside FP8 weights
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [BLOCK, BLOCK],
}


def load(
    path: str | os.PathLike,
    dtype: str | None = None,
    shardings: Transformer | None = None,
    keep_fp8: bool = False,
) -> tuple[ModelConfig, Transformer]:
    """Reads a model folder in float32, bfloat16, float16 or the FP8 release layout.

    `dtype` overrides the config's; router and its bias stay float32. `shardings` says where each parameter goes
    (default: the first device). Each device's shard is read and placed by itself, so the host holds one shard and one
    file tensor at a time. With `keep_fp8` what is FP8 in the files stays so (`Quantised`): to run, not to train.

    Raises:
        CheckpointError: naming every missing, unexpected and misshapen tensor and wrong dtype at once, or the first
            tensor that holds NaN; nothing is half-loaded.
    """
    folder = Path(path)
    config = read_config(folder)
    if dtype is not None:
        config = dataclasses.replace(config, dtype=dtype)
    tensors = Tensors(folder)
    entries = layout.entries(config)
    fit.check(folder, config, entries, tensors)
    leaves = weights.abstract(config)
    if shardings is None:
        first = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        shardings = tree.map_leaves(lambda _: first, leaves)

    def read(entries: Entry | list[Entry], leaf: tree.Leaf, sharding) -> jax.Array:
        stack = entries if isinstance(entries, list) else [entries]
        axis = stack[0].blocked
        wide = axis is None or leaf.dtype is not None  # the embedding is indexed, and the router float32
        if keep_fp8 and not wide and all(tensors.dtype[n] == FP8 for entry in stack for n, _ in entry.tensors()):
            return _quantised(tensors, entries, axis, leaf, sharding)
        part = lambda entry, names: entry.join([tensors.get(n) for n in names])
        return _place(leaf, config.dtype, sharding, partial(_fill, part, entries))

    def read_all(entries, leaves, shardings):
        is_entry = lambda x: isinstance(x, Entry) or (isinstance(x, list) and isinstance(x[0], Entry))
        return jax.tree.map(read, entries, leaves, shardings, is_leaf=is_entry)

    layers, groups = entries.groups[0], []
    for group, declared, places in zip(config.groups, leaves.groups, shardings.groups, strict=True):
        step, made = len(group.pattern), []
        for i, (leaf_layer, place) in enumerate(zip(declared, places, strict=True)):
            rows = [layers[n] for n in range(group.first + i, group.first + step * group.repeats, step)]
            stacked = rows[0] if group.repeats == 1 else _map(lambda *same: list(same), *rows)
            made.append(read_all(stacked, leaf_layer, place))
        groups.append(tuple(made))
    parts = ("embed", "norm", "head", "draft")
    rest = {k: read_all(getattr(entries, k), getattr(leaves, k), getattr(shardings, k)) for k in parts}
    return config, Transformer(groups=tuple(groups), value=None, **rest)


def _place(leaf: tree.Leaf, dtype: str, sharding, fill) -> jax.Array:
    """One parameter, shard by shard; equal shards of several devices are read once."""
    devices: dict[tuple, list] = {}
    for device, index in sharding.addressable_devices_indices_map(leaf.shape).items():
        whole = tuple(slice(*s.indices(n)) for s, n in zip(index, leaf.shape, strict=True))
        devices.setdefault(tuple((s.start, s.stop) for s in whole), []).append(device)
    shards = []
    for bounds, on in devices.items():
        index = tuple(slice(*b) for b in bounds)
        out = np.empty([stop - start for start, stop in bounds], jax.numpy.dtype(leaf.dtype or dtype))
        fill(out, index)
        shards += jax.block_until_ready([jax.device_put(out, device) for device in on])
    return jax.make_array_from_single_device_arrays(leaf.shape, sharding, shards)


def _fill(part, entries: Entry | list[Entry], out: np.ndarray, index: tuple[slice, ...]) -> None:
    """Writes the part `index` of a parameter: of a stack layer by layer, of experts one by one.

    `part(entry, names)` is what one group of file tensors holds.
    """
    if isinstance(entries, list):
        for layer, entry in zip(out, entries[index[0]], strict=True):
            _fill(part, entry, layer, index[1:])
    elif entries.many:
        for expert, names in zip(out, entries.groups[index[0]], strict=True):
            expert[...] = part(entries, names)[index[1:]]
    else:
        out[...] = part(entries, entries.groups[0])[index]


def _quantised(tensors: Tensors, entries: Entry | list[Entry], axis: int, leaf: tree.Leaf, sharding) -> Quantised:
    """A parameter in FP8. Its scales are split as it is, but for the axis that they have in blocks."""
    blocks = list(leaf.shape)
    blocks[axis] = -(-blocks[axis] // BLOCK)

    def values(entry, names):
        return entry.join([tensors.get_fp8(n)[0] for n in names])

    def scales(entry, names):
        spread = entry.join([tensors.get_fp8(n)[1] for n in names])
        return np.moveaxis(np.moveaxis(spread, axis, 0)[::BLOCK], 0, axis)

    scale_sharding = sharding
    if isinstance(sharding, NamedSharding):
        spec = [*sharding.spec, *[None] * (len(leaf.shape) - len(sharding.spec))]
        spec[axis] = None
        scale_sharding = NamedSharding(sharding.mesh, PartitionSpec(*spec))
    value = _place(dataclasses.replace(leaf, dtype="float8_e4m3fn"), "", sharding, partial(_fill, values, entries))
    of_scales = dataclasses.replace(leaf, shape=tuple(blocks), dtype="float32")
    return Quantised(value, _place(of_scales, "", scale_sharding, partial(_fill, scales, entries)), axis)


def save(path: str | os.PathLike, config: ModelConfig, params: Transformer, shard_bytes: int = SHARD_BYTES) -> None:
    """Writes a model folder that transformers and `load` read. Appears whole or not at all.

    A model that stood there is replaced, other files stay. The host holds one layer and one file of `shard_bytes` at
    a time. Where several processes run, each makes the call, and the first of them writes.
    """
    if jax.process_index() != 0:
        for _ in _file_tensors(config, params):  # its share of fetching them
            pass
        return
    folder = Path(path)
    unfinished = folder / ".partial"
    shutil.rmtree(unfinished, ignore_errors=True)  # of a save that was interrupted
    unfinished.mkdir(parents=True)
    shards: list[list[str]] = []
    total = 0
    for shard in _shards(_file_tensors(config, params), shard_bytes):
        save_file(shard, unfinished / f"{len(shards)}.part", metadata={"format": "pt"})
        shards.append(list(shard))
        total += sum(tensor.nbytes for tensor in shard.values())
        shard.clear()  # before the next one is filled
    names = [f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))]
    if len(shards) == 1:
        names = [SINGLE]
    else:
        weight_map = {k: name for name, shard in zip(names, shards, strict=True) for k in shard}
        (unfinished / INDEX).write_text(
            json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2)
        )
    for i, name in enumerate(names):
        (unfinished / f"{i}.part").rename(unfinished / name)
    quantised = any(isinstance(leaf, Quantised) for leaf in _leaves(params))
    described = to_hf(config) | ({"quantization_config": FP8_CONFIG} if quantised else {})
    (unfinished / "config.json").write_text(json.dumps(described, indent=2) + "\n")
    # The old config goes first and the new one comes last: a folder without one is no model.
    for file in ("config.json", INDEX, SINGLE, *(f.name for f in folder.glob("model-*-of-*.safetensors"))):
        (folder / file).unlink(missing_ok=True)
    for file in sorted(unfinished.iterdir(), key=lambda f: f.name == "config.json"):
        os.replace(file, folder / file.name)
    unfinished.rmdir()


def read_config(folder: Path) -> ModelConfig:
    """The architecture; without a draft layer where the files hold none, as transformers saves them."""
    file = folder / "config.json"
    if not file.is_file():
        raise CheckpointError(f"{folder} holds no config.json: give the folder of a Hugging Face model")
    config = from_hf(read_json(file), str(file), partial(_stored_dtype, folder))
    if config.num_nextn_predict_layers and any((folder / name).is_file() for name in (INDEX, SINGLE)):
        prefix = layout.draft_prefix(config)
        if not any(name.startswith(prefix) for name in Tensors(folder).shape):
            logger.info("%s: the config names a draft (MTP) layer and the files hold none", folder)
            config = dataclasses.replace(config, num_nextn_predict_layers=0)
    return config


def _stored_dtype(folder: Path) -> str:
    """That of the embedding: it is never FP8, and no part of the router, which may be wider than the rest."""
    stored = Tensors(folder).dtype.get(fit.EMBEDDING)
    names = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
    if stored not in names:
        raise CheckpointError(
            f"{folder / 'config.json'}: dtype is 'auto' and {fit.EMBEDDING} is {stored or 'absent'}: write one of "
            f"{', '.join(names.values())}"
        )
    return names[stored]


def _map(f, *trees):
    return jax.tree.map(f, *trees, is_leaf=lambda x: isinstance(x, Entry))


def _shards(tensors: Iterator[tuple[str, np.ndarray]], most: int) -> Iterator[dict[str, np.ndarray]]:
    """The tensors in order, as many at a time as `most` bytes hold, but at least one."""
    shard, size = {}, 0
    for name, tensor in tensors:
        if shard and size + tensor.nbytes > most:
            yield shard
            shard, size = {}, 0
        shard[name] = np.ascontiguousarray(tensor)
        size += tensor.nbytes
    yield shard


def _file_tensors(config: ModelConfig, params: Transformer) -> Iterator[tuple[str, np.ndarray]]:
    """(name, tensor) of every file tensor, in layer order; what is on devices is fetched a layer at a time."""
    entries = layout.entries(config)
    for key in ("embed", "norm", "head"):
        if (entry := getattr(entries, key)) is not None:
            yield from _tensors(entry, _fetched(getattr(params, key)))
    for entry_layer, layer in zip(entries.groups[0], _layers(config, params), strict=True):
        yield from _layer_tensors(entry_layer, layer)
    if entries.draft is not None:
        yield from _layer_tensors(entries.draft.layer, _fetched(params.draft.layer))
        for key in ("embed_norm", "hidden_norm", "proj", "norm"):
            yield from _tensors(getattr(entries.draft, key), _fetched(getattr(params.draft, key)))


def _layers(config: ModelConfig, params: Transformer) -> Iterator[Layer]:
    for group, layers in zip(config.groups, params.groups, strict=True):
        for r in range(group.repeats):
            for layer in layers:
                yield _fetched(layer if group.repeats == 1 else jax.tree.map(lambda a, r=r: a[r], layer))


def _fetched(tree):
    """The arrays of a tree on the host, whole, those that several processes hold too."""
    split = lambda a: isinstance(a, jax.Array) and not (a.is_fully_addressable or a.is_fully_replicated)
    return jax.device_get(jax.tree.map(lambda a: process_allgather(a, tiled=True) if split(a) else a, tree))


def _layer_tensors(entries: Layer, layer: Layer) -> Iterator[tuple[str, np.ndarray]]:
    kv_b = entries.attn.k_b.groups
    merged = lambda part: [(kv_b[0][0], layout.merge_kv(part(layer.attn.k_b), part(layer.attn.v_b)))]
    yield from _with_scales(merged, layer.attn.k_b)
    for entry, leaf in zip(layout.all_entries(entries), _leaves(layer), strict=True):
        if entry.groups != kv_b:
            yield from _tensors(entry, leaf)


def _tensors(entry: Entry, leaf: np.ndarray | Quantised) -> Iterator[tuple[str, np.ndarray]]:
    return _with_scales(lambda part: entry.take_apart(part(leaf)), leaf)


def _leaves(tree) -> list:
    return jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, Quantised))


def _with_scales(tensors_of, leaf: np.ndarray | Quantised) -> Iterator[tuple[str, np.ndarray]]:
    """`tensors_of(part)`, names and file tensors of a part of a leaf: of itself, or of FP8 values and their scales."""
    if not isinstance(leaf, Quantised):
        yield from tensors_of(lambda leaf: leaf)
        return
    yield from tensors_of(lambda leaf: leaf.value)
    for name, spread in tensors_of(_spread):
        yield name + SCALE, spread[::BLOCK, ::BLOCK]


def _spread(leaf: Quantised) -> np.ndarray:
    size = leaf.shape[leaf.axis]
    return np.repeat(leaf.scale, BLOCK, axis=leaf.axis).take(range(size), axis=leaf.axis)
