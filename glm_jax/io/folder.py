"""The JSON files of a model folder, and what they say of its others: which file holds which tensor."""

from __future__ import annotations

import json
from pathlib import Path, PurePosixPath
from typing import Any

from glm_jax.text import TextError, read_text

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"


class CheckpointError(ValueError):
    """A model folder that cannot be read as what its config says."""


def read_json(file: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises CheckpointError where it holds none, or one key twice."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        made = dict(pairs)
        if len(made) < len(pairs):
            keys = [key for key, _ in pairs]
            raise ValueError(f"it has {', '.join(sorted(k for k in made if keys.count(k) > 1))} more than once")
        return made

    try:
        value = json.loads(read_text(file), object_pairs_hook=once)
    except TextError as error:
        raise CheckpointError(str(error)) from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} is not usable JSON: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{file} holds a {type(value).__name__}, not an object")
    return value


def files(folder: Path) -> dict[Path, list[str] | None]:
    """The safetensors files of a model, and the tensors that each of them is read for; None: all that it holds.

    Where there is an index it decides: what a file holds beyond it, such as a stale copy, is not the model's.
    """
    of_file: dict[str, list[str] | None] = {SINGLE: None}
    if (folder / INDEX).is_file():
        of_file = _indexed(folder / INDEX)
    if absent := sorted(name for name in of_file if not (folder / name).is_file()):
        raise CheckpointError(f"{folder} lacks {', '.join(absent)}")
    return {folder / name: tensors for name, tensors in of_file.items()}


def _indexed(index: Path) -> dict[str, list[str]]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise CheckpointError(f"{index} has no weight_map from tensor names to names of files")
    outside = sorted(name for name in set(weight_map.values()) if _leaves_folder(name))
    if outside:
        raise CheckpointError(f"{index} names files outside its folder: {', '.join(outside)}; put them beside it")
    of_file: dict[str, list[str]] = {}
    for tensor, name in weight_map.items():
        of_file.setdefault(name, []).append(tensor)
    return of_file


def _leaves_folder(name: str) -> bool:
    """By the name alone: caches of downloads hold links to files elsewhere, and those are the user's own."""
    path = PurePosixPath(name.replace("\\", "/"))
    return path.is_absolute() or ".." in path.parts
