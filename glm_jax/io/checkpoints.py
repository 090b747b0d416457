"""Checkpoints of a run: policy, critic and the host's record of one instant, whole or not at all.

A step is a folder written by orbax. What orbax commits carries no checksum of the arrays, so a last file with the
CRC-32 of every other file is written after it: a step without that file, or whose files differ from it, is damaged.
"""

from __future__ import annotations

import heapq
import json
import logging
import os
import zlib
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

logger = logging.getLogger(__name__)

POLICY, CRITIC, HOST = "policy", "critic", "host"
SCORE = "score"  # in a host item: by which the best steps are told, if there is one
SEAL = "seal.json"  # commits a step
UNFINISHED = "it was not finished"


class CheckpointError(RuntimeError):
    """A checkpoint that is needed is missing or damaged, or belongs to another run."""


class Checkpoints:
    """The checkpoints in a folder: the last `keep` stay, and those `best` whose host items name the highest score.

    A context manager. Saving goes on in the background; a step that fails there raises at the next call, or on leaving.
    Where several processes run, each of them makes every call; after an error nothing is waited for, as the others may
    not come to it.
    """

    def __init__(self, folder: Path | str, keep: int = 2, best: int = 0):
        self.folder, self.keep, self.best = Path(folder).absolute(), keep, best
        if self.folder.exists() and not self.folder.is_dir():
            raise CheckpointError(
                f"{self.folder} is no folder, and holds no checkpoint to go on from: put the folder of checkpoints "
                "back, or move that file away to start anew."
            )
        self.folder.mkdir(parents=True, exist_ok=True)
        # Orbax would let old steps go before the new one is sealed.
        options = ocp.CheckpointManagerOptions(max_to_keep=None)
        handlers = {POLICY: _arrays(), CRITIC: _arrays(), HOST: ocp.JsonCheckpointHandler()}
        self._manager = ocp.CheckpointManager(self.folder, options=options, item_handlers=handlers)
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._pending: tuple[int, Future[None]] | None = None

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, kind: type | None, *_: object) -> None:
        if kind is None or jax.process_count() == 1:
            self.close()

    def close(self) -> None:
        """Waits for what is being saved."""
        try:
            self.wait()
        finally:
            self._thread.shutdown()
            self._manager.close()

    def save(self, step: int, policy: Any, critic: Any, host: dict) -> None:
        """Saves step `step`; critic may be None.

        Returns once the arrays are held on the host, so that the program may donate them; `wait` returns once the step
        survives a kill.
        """
        self.wait()
        items = {POLICY: ocp.args.PyTreeSave(policy), HOST: ocp.args.JsonSave(host)}
        if critic is not None:
            items[CRITIC] = ocp.args.PyTreeSave(critic)
        self._manager.save(step, args=ocp.args.Composite(**items), force=True)
        self._pending = step, self._thread.submit(self._finish, self.folder / str(step))

    def wait(self) -> None:
        """Returns once all that was saved survives a kill. Raises CheckpointError where it was not written."""
        if self._pending is None:
            return
        (step, done), self._pending = self._pending, None
        try:
            done.result()
        except (OSError, ValueError, RuntimeError) as error:
            raise CheckpointError(f"checkpoint {step} in {self.folder} could not be written: {error}") from error
        self._drop_old()

    def _finish(self, folder: Path) -> None:
        self._manager.wait_until_finished()
        _seal(folder)

    def _drop_old(self) -> None:
        steps = sorted(self._manager.all_steps())
        scored = [(score, step) for step in steps if (score := _score(self.folder / str(step))) is not None]
        # Of equal scores the newer step's.
        kept = {*steps[-self.keep :], *(step for _, step in heapq.nlargest(self.best, scored))}
        # The first process tells which, once it has sealed the newest.
        drop = ocp.multihost.broadcast_one_to_all(np.asarray([step not in kept for step in steps]))
        for step, goes in zip(steps, drop, strict=True):
            if goes:
                self._manager.delete(step)

    def newest(self) -> tuple[int, dict] | None:
        """The newest whole step and its host item; None where no save was ever finished.

        A damaged step is skipped with a warning that names it and moved aside, so that its place is free again. Raises
        CheckpointError when there are steps but none is whole, unless the only one is a first save that was cut off.
        """
        self.wait()
        found = self._search() if jax.process_index() == 0 else None
        step = int(ocp.multihost.broadcast_one_to_all(np.asarray(-1 if found is None else found)))
        if jax.process_index() != 0:
            self._manager.reload()
        return None if step < 0 else (step, read_host(self.folder / str(step)))

    def _search(self) -> int | None:
        steps, problem = sorted(self._manager.all_steps(), reverse=True), None
        for step in steps:
            folder = self.folder / str(step)
            problem = damage(folder)
            if problem is None:
                return step
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
        self.wait()
        items = {POLICY: _onto(policy)}
        if critic is not None:
            items[CRITIC] = _onto(critic)
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
    with ocp.Checkpointer(_arrays()) as checkpointer:
        return checkpointer.restore(folder / POLICY, args=_onto({"params": params}, partial_restore=True))["params"]


def _arrays() -> ocp.PyTreeCheckpointHandler:
    # Weights and moments hardly compress (8 % of random floats), and compressing takes most of a save's time.
    return ocp.PyTreeCheckpointHandler(use_compression=False)


def _onto(tree: Any, **options: Any) -> ocp.args.PyTreeRestore:
    item = abstract(tree)
    arguments = ocp.checkpoint_utils.construct_restore_args(item)
    return ocp.args.PyTreeRestore(item=item, restore_args=arguments, **options)


def abstract(tree: Any) -> Any:
    """Shapes, dtypes and shardings of a tree of arrays: what a restore needs to know of its target."""

    def leaf(x: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=getattr(x, "sharding", None))

    return jax.tree.map(leaf, tree)


def read_host(step_folder: Path) -> dict:
    """The host item of a step."""
    with ocp.Checkpointer(ocp.JsonCheckpointHandler()) as checkpointer:
        return checkpointer.restore(step_folder / HOST)


def _score(step_folder: Path) -> float | None:
    try:
        return read_host(step_folder).get(SCORE)
    except (OSError, ValueError):
        return None  # a damaged step


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
