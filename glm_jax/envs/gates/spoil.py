"""Right answers made wrong, each in a way that a careless comparison does not see: `abs(NaN - 1) > 1e-9` is false, and
`zip` ends with the shorter.

This file imports the standard library alone and is used twice: the gates import it to see what an answer would become,
and its text goes into the forged programs, which do what the oracle does and spoil what comes of it.
"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

_SPECIAL = {"NaN": float("nan"), "inf": float("inf"), "-inf": float("-inf")}
_CONSTANT = {"empty list": [], "empty text": "", "null": None}
NAMES = (*_SPECIAL, *_CONSTANT, "a prefix", "repeated")
_NUMBER = re.compile(r"(?<![\w.])[-+]?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?(?![\w.])")


def value(name, right):
    """A value: of NaN and infinities in the shape of the right one where that holds numbers."""
    if name in _SPECIAL:
        return _filled(right, _SPECIAL[name]) if _numbers(right) else _SPECIAL[name]
    if name in _CONSTANT:
        return _CONSTANT[name]
    if name == "repeated":
        return right + right if isinstance(right, list | tuple | str) else right
    if isinstance(right, dict):
        return dict(list(right.items())[: len(right) // 2])
    return right[: len(right) // 2] if isinstance(right, list | tuple | str) else right


def text(name, right):
    """What a file holds or a program prints: as JSON where it is a list or table, else by its numbers and lines."""
    lines = right.splitlines(keepends=True)
    read, is_json = _read(right)
    if isinstance(read, list | dict) and (spoilt := json.dumps(value(name, read))) != json.dumps(read):
        return spoilt
    if name in _SPECIAL:
        word = json.dumps(_SPECIAL[name]) if is_json or all(_read(line)[1] for line in lines) else name.lower()
        return _NUMBER.sub(word, right) if _NUMBER.search(right) else word
    if name in _CONSTANT:
        return "" if name == "empty text" else json.dumps(_CONSTANT[name])
    half = "".join(lines[: len(lines) // 2]) if len(lines) > 1 else right[: len(right) // 2]
    return right + right if name == "repeated" else half


def request(name, right, last):
    """A line to a service: of those that look like the last one, which hands the answer in, what is no text in it."""
    read = json.loads(right)
    if _look(read) != _look(json.loads(last)):
        return right
    if isinstance(read, dict):
        return json.dumps({key: one if isinstance(one, str) else value(name, one) for key, one in read.items()})
    return json.dumps(value(name, read))


def functions(name, source, path):
    """The `__getattr__` of a module: the functions of one with that source, their results spoilt."""
    own = {"__name__": Path(path).stem, "__file__": path}
    exec(compile(source, path, "exec"), own)

    def get(attribute):
        if attribute not in own:
            raise AttributeError(attribute)
        return lambda *given, **named: value(name, own[attribute](*given, **named))

    return get


def program(name, source, path, shell, last):
    """Runs a program with that source and spoils what it prints, or asks of a service whose `last` request is known."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, Path(path).name)
        file.write_text(source)
        start = ["bash"] if shell else sys.orig_argv[: -len(sys.argv)]
        child = subprocess.Popen(
            [*start, str(file), *sys.argv[1:]],
            stdout=subprocess.PIPE,
            env={"PYTHONPATH": str(Path(path).parent), "PATH": "/usr/bin:/bin"},
            encoding="utf-8",
            errors="surrogateescape",
        )
        sys.stdout.reconfigure(encoding="utf-8", errors="surrogateescape")
        if last is None:
            print(text(name, child.stdout.read()), end="", flush=True)
        else:
            for line in child.stdout:
                print(request(name, line, last).rstrip("\n"), flush=True)
        sys.exit(child.wait())


def _read(right):
    """(value, whether it is JSON at all)."""
    try:
        return json.loads(right), True
    except (ValueError, RecursionError):
        return None, False


def _numbers(right):
    """Whether there is a number in it, or it is an array."""
    if isinstance(right, dict):
        return any(map(_numbers, right.values()))
    if isinstance(right, list | tuple):
        return any(map(_numbers, right))
    return hasattr(right, "shape") or (isinstance(right, int | float) and not isinstance(right, bool))


def _filled(right, special):
    if isinstance(right, dict):
        return {key: _filled(one, special) for key, one in right.items()}
    if isinstance(right, list | tuple):
        return [_filled(one, special) for one in right]
    return right * 0 + special if _numbers(right) else right


def _look(read):
    """A request without what is no text in it."""
    return {key: one if isinstance(one, str) else None for key, one in read.items()} if isinstance(read, dict) else None
