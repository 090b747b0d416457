"""Files as values: what goes into a box and what comes out of one."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class File:
    """A file's content and mode."""

    data: bytes
    mode: int = 0o644


Tree = Mapping[str, File]  # by path: absolute in a box, relative to a folder of the host


def read_tree(folder: Path) -> dict[str, File]:
    """The regular files below a folder, by relative path. Raises ValueError for a link or anything else."""
    found = {}
    for place, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if name != "__pycache__")
        for name in [*sorted(names), *folders]:
            path = Path(place, name)
            mode = path.lstat().st_mode
            if stat.S_ISREG(mode):
                # Only the executable bit is a task's; the others depend on who checked it out.
                found[str(path.relative_to(folder))] = File(path.read_bytes(), 0o755 if mode & 0o100 else 0o644)
            elif not stat.S_ISDIR(mode):
                raise ValueError(f"{path} is neither file nor folder; a task holds nothing else, so copy what it means")
    return found


def placed(tree: Tree, folder: str) -> dict[str, File]:
    """The same files below an absolute folder."""
    return {f"{folder.rstrip('/')}/{path}": file for path, file in tree.items()}


def digest(tree: Tree) -> str:
    """SHA-256 over paths, modes and contents."""
    total = hashlib.sha256()
    for path in sorted(tree):
        file = tree[path]
        name = path.encode(errors="surrogateescape")
        total.update(b"%d %d %o %s" % (len(name), len(file.data), file.mode, name))
        total.update(file.data)
    return total.hexdigest()
