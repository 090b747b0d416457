"""Checkpoints of a run: policy, critic and the host's record of one instant, whole or not at all.

A step is a folder written by orbax. What orbax commits carries no checksum of the arrays, so a last file with the
CRC-32 of every other file is written after it: a step without that file, or whose files differ from it, is damaged.
"""

from __future__ import annotations

import json
import logging
import os
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

logger = logging.getLogger(__name__)

POLICY, CRITIC, HOST = "policy", "critic", "host"
SEAL = "seal.json"  # commits a step
UNFINISHED = "it was not finished"


class CheckpointError(RuntimeError):
    """A checkpoint that is needed is missing or damaged, or belongs to another run."""


class Checkpoints:
    """The checkpoints in a folder, of which the last `keep` stay. A context manager."""

    def __init__(self, folder: Path | str, keep: int = 2):
        self.folder = Path(folder).absolute()
        self.folder.mkdir(parents=True, exist_ok=True)
        # Saving is synchronous: the program donates its state to the next round.
        options = ocp.CheckpointManagerOptions(max_to_keep=keep, enable_async_checkpointing=False)
        self._manager = ocp.CheckpointManager(self.folder, options=options, item_names=(POLICY, CRITIC, HOST))

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._manager.close()

    def save(self, step: int, policy: Any, critic: Any, host: dict) -> None:
        """Saves step `step`; once this returns it survives a kill. critic may be None."""
        items = {POLICY: ocp.args.StandardSave(policy), HOST: ocp.args.JsonSave(host)}
        if critic is not None:
            items[CRITIC] = ocp.args.StandardSave(critic)
        self._manager.save(step, args=ocp.args.Composite(**items), force=True)
        self._manager.wait_until_finished()
        _seal(self.folder / str(step))

    def newest(self) -> tuple[int, dict] | None:
        """The newest whole step and its host item; None where no save was ever finished.

        A damaged step is skipped with a warning that names it and moved aside, so that its place is free again. Raises
        CheckpointError when there are steps but none is whole, unless the only one is a first save that was cut off.
        """
        steps, problem = sorted(self._manager.all_steps(), reverse=True), None
        for step in steps:
            folder = self.folder / str(step)
            problem = damage(folder)
            if problem is None:
                return step, read_host(folder)
            aside = self._set_aside(folder)
            logger.warning("checkpoint %d is damaged (%s): skipped, and moved to %s", step, problem, aside)
        if steps and not (len(steps) == 1 and problem == UNFINISHED):
            raise CheckpointError(
                f"none of the checkpoints {steps} in {self.folder} is whole (see the warnings above). Restore one of "
                "them, or start anew in an empty --workdir."
            )
        return None

    def restore(self, step: int, policy: Any, critic: Any) -> tuple[Any, Any]:
        """Policy and critic of `step`, bit by bit, placed like the given trees of arrays or ShapeDtypeStructs."""
        items = {POLICY: ocp.args.StandardRestore(abstract(policy))}
        if critic is not None:
            items[CRITIC] = ocp.args.StandardRestore(abstract(critic))
        found = self._manager.restore(step, args=ocp.args.Composite(**items))
        return found[POLICY], found[CRITIC] if critic is not None else None

    def _set_aside(self, folder: Path) -> Path:
        number = 0
        while (aside := self.folder.parent / f"damaged-{folder.name}-{number}").exists():
            number += 1
        os.replace(folder, aside)
        self._manager.reload()
        return aside


def restore_weights(step_folder: Path | str, params: Any) -> Any:
    """The policy's parameters alone, placed like `params`. step_folder: WORKDIR/checkpoints/STEP."""
    folder = Path(step_folder).absolute()
    if problem := damage(folder):
        raise CheckpointError(f"checkpoint {folder} is damaged: {problem}.")
    item = {"params": abstract(params)}
    arguments = ocp.checkpoint_utils.construct_restore_args(item)
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        restore = ocp.args.PyTreeRestore(item=item, restore_args=arguments, partial_restore=True)
        return checkpointer.restore(folder / POLICY, args=restore)["params"]


def abstract(tree: Any) -> Any:
    """Shapes, dtypes and shardings of a tree of arrays: what a restore needs to know of its target."""

    def leaf(x: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=getattr(x, "sharding", None))

    return jax.tree.map(leaf, tree)


def read_host(step_folder: Path) -> dict:
    """The host item of a step."""
    with ocp.Checkpointer(ocp.JsonCheckpointHandler()) as checkpointer:
        return checkpointer.restore(step_folder / HOST)


def check_same_run(host: dict, config: dict[str, Any], workdir: Path) -> None:
    """Raises CheckpointError naming every key in which the checkpoint's config differs from `config` (flat, dotted)."""
    saved = host.get("config", {})
    missing = "(absent)"
    keys = sorted({*saved, *config})
    differ = [key for key in keys if saved.get(key, missing) != config.get(key, missing)]
    if differ:
        lines = [f"  {key}: {saved.get(key, missing)} there, {config.get(key, missing)} now" for key in differ]
        raise CheckpointError(
            "\n".join([f"{workdir} holds a run of another config:", *lines, "Use its config, or another --workdir."])
        )


def damage(folder: Path) -> str | None:
    """What is wrong with a step's files, or None."""
    try:
        wanted = json.loads((folder / SEAL).read_text())
    except FileNotFoundError:
        return UNFINISHED
    except (OSError, ValueError):
        return f"{SEAL} cannot be read"
    return _first_problem(folder, wanted, _crc)


def _first_problem(folder: Path, wanted: dict[str, int], crc: Callable[[Path], int]) -> str | None:
    for name, value in wanted.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if crc(path) != value:
            return f"{name} has other bytes than were written"
    return None


def _seal(folder: Path) -> None:
    """Writes the CRC-32 of every file of a step, atomically and onto the disk."""
    if jax.process_index() != 0:
        return
    sums = {str(path.relative_to(folder)): _crc(path) for path in sorted(folder.rglob("*")) if path.is_file()}
    part = folder / f"{SEAL}.part"
    with open(part, "w") as file:
        json.dump(sums, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(part, folder / SEAL)
    handle = os.open(folder, os.O_RDONLY)
    os.fsync(handle)
    os.close(handle)


def _crc(path: Path) -> int:
    value = 0
    with open(path, "rb") as file:
        while chunk := file.read(1 << 22):
            value = zlib.crc32(chunk, value)
    return value
