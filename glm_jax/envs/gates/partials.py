"""Unfinished work, derived from the oracle's: each leaves out one part, so that no verifier may reward it."""

from __future__ import annotations

import ast
import difflib
import json
from collections.abc import Callable, Iterator, Mapping

from glm_jax.envs.sandbox.files import File

_MOST = 6  # of each kind and file, spread evenly


def derived(start: Mapping[str, File], oracle: Mapping[str, File]) -> dict[str, dict[str, File]]:
    """name -> files, from the artifacts of the start state and of the oracle. None is equal to either."""
    changed = [path for path, file in oracle.items() if start.get(path) != file]
    removed = [path for path in start if path not in oracle]
    found: dict[str, dict[str, File]] = {}

    def add(name: str, path: str, data: bytes | None) -> None:
        files = dict(oracle)
        if data is None:
            files.pop(path, None)
        else:
            files[path] = File(data, oracle.get(path, start.get(path, File(b""))).mode)
        if files != oracle and files != start and files not in found.values():
            found[name] = files

    for path in removed:
        add(f"{path} kept", path, start[path].data)
    for path in changed:
        before = start.get(path)
        add(f"{path} as it was" if before else f"no {path}", path, before.data if before else None)
        text = oracle[path].data
        lines = text.splitlines(keepends=True)
        half = b"".join(lines[: len(lines) // 2]) if len(lines) > 1 else text[: len(text) // 2]
        add(f"half of {path}", path, half)
        for name, data in _spread(_pieces(path, before, text)):
            add(f"{path} {name}", path, data)
    return found


def _pieces(path: str, before: File | None, text: bytes) -> list[tuple[str, bytes]]:
    """The file with one part left out, for each part."""
    if before is not None and (hunks := list(_hunks(before.data, text))):
        return hunks
    kinds: dict[str, Callable[[bytes], Iterator[tuple[str, bytes]]]] = {".py": _statements, ".json": _keys}
    suffix = f".{path.rpartition('.')[2]}"
    try:
        return list(kinds[suffix](text)) if suffix in kinds else []
    except (SyntaxError, ValueError):
        return []


def _hunks(before: bytes, after: bytes) -> Iterator[tuple[str, bytes]]:
    """One change undone at a time, where there are several; changes of blank lines and comments apart."""
    old, new = before.splitlines(keepends=True), after.splitlines(keepends=True)
    blocks = [op for op in difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes() if op[0] != "equal"]
    says = lambda lines: [line for line in lines if line.strip() and not line.strip().startswith((b"#", b"//", b'"""'))]
    blocks = [block for block in blocks if says(old[block[1] : block[2]]) != says(new[block[3] : block[4]])]
    for _, i1, i2, j1, j2 in blocks if len(blocks) > 1 else ():
        yield f"without the change at line {j1 + 1}", b"".join([*new[:j1], *old[i1:i2], *new[j2:]])


def _statements(text: bytes) -> Iterator[tuple[str, bytes]]:
    """A Python file without one statement; docstrings and imports stay."""
    lines = text.decode().splitlines(keepends=True)
    for node in ast.walk(ast.parse(text)):
        for body in (getattr(node, "body", None), getattr(node, "orelse", None)):
            for statement in body if isinstance(body, list) else ():
                doc = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
                if doc or isinstance(statement, ast.Import | ast.ImportFrom | ast.Pass):
                    continue
                decorated = [one.lineno for one in getattr(statement, "decorator_list", ())]
                first, last = min([statement.lineno, *decorated]) - 1, statement.end_lineno
                indent = lines[first][: len(lines[first]) - len(lines[first].lstrip())]
                if lines[first].strip().startswith("elif"):
                    continue
                kept = [*lines[:first], f"{indent}pass\n", *lines[last:]]
                yield f"without the statement at line {first + 1}", "".join(kept).encode()


def _keys(text: bytes) -> Iterator[tuple[str, bytes]]:
    """A JSON object without one key."""
    value = json.loads(text)
    for key in value if isinstance(value, dict) and len(value) > 1 else ():
        yield f"without {key!r}", json.dumps({k: v for k, v in value.items() if k != key}).encode()


def _spread(found: list[tuple[str, bytes]]) -> list[tuple[str, bytes]]:
    if len(found) <= _MOST:
        return found
    return [found[i * (len(found) - 1) // (_MOST - 1)] for i in range(_MOST)]
