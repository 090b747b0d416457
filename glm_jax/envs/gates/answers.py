"""Attacks that hand in right answers, each spoilt in one way: what the oracle made, and what its programs come to.

A way that leaves every answer as it is would be the oracle; it is left out, and said to be.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from glm_jax.envs.gates import spoil
from glm_jax.envs.sandbox.files import File

_SOURCE = Path(spoil.__file__).read_text()
SAME = "leaves every answer as it is, left out"
UNKNOWN = "the verifier does not tell what was answered, left out"
_DEPENDENT = ("a prefix", "repeated")  # ways that may leave an answer as it is


def spoilt(
    start: Mapping[str, File], oracle: Mapping[str, File], record: Sequence[Mapping[str, Any]]
) -> tuple[dict[str, dict[str, File]], dict[str, str]]:
    """(name -> artifacts, name -> why it was left out): for the programs that the oracle wrote, and for its files.

    `record` is what the oracle was asked and answered. It tells which of the programs answer; without it all do.
    """
    changed = [path for path, file in oracle.items() if start.get(path) != file]
    programs = [path for path in changed if path.endswith((".py", ".sh"))]
    asked = [one for one in record if _asked(one) & {*programs}]
    entries = [path for path in programs if not asked or any(path in _asked(one) for one in asked)]
    files = [path for path in changed if path not in programs]
    cases, left_out = {}, {}
    for name in spoil.NAMES:
        if not asked and name in _DEPENDENT and entries:
            left_out[f"spoilt: {name}"] = UNKNOWN
        elif asked and not any(_spoils(name, one) for one in asked):
            left_out[f"spoilt: {name}"] = SAME
        elif entries:
            forged = {path: File(_program(name, path, oracle[path], asked), oracle[path].mode) for path in entries}
            cases[f"spoilt: {name}"] = {**oracle, **forged}
        forged = {path: File(_text(name, oracle[path].data), oracle[path].mode) for path in files}
        if files and forged == {path: oracle[path] for path in files}:
            left_out[f"spoilt files: {name}"] = SAME
        elif files:
            cases[f"spoilt files: {name}"] = {**oracle, **forged}
    return cases, left_out


def _asked(one: Mapping[str, Any]) -> set[str]:
    """What may be the path of the program that was asked."""
    return {one["path"]} if "path" in one else {*one["argv"]}


def _spoils(name: str, one: Mapping[str, Any]) -> bool:
    """Whether a recorded answer would be another."""
    if "found" in one:
        right = [found["value"] for found in one["found"] if "value" in found]
        return json.dumps([spoil.value(name, value) for value in right]) != json.dumps(right)
    if "last" in one:
        return json.loads(spoil.request(name, one["last"], one["last"])) != json.loads(one["last"])
    return _text(name, one["out"].encode("latin-1")) != one["out"].encode("latin-1")


def _text(name: str, right: bytes) -> bytes:
    return spoil.text(name, right.decode(errors="surrogateescape")).encode(errors="surrogateescape")


def _program(name: str, path: str, right: File, asked: Sequence[Mapping[str, Any]]) -> bytes:
    """The text of a program: functions to one who imports it, else what it prints or asks of a service."""
    source, shell = right.data.decode(errors="replace"), path.endswith(".sh")
    last = next((one["last"] for one in asked if "last" in one and path in one["argv"]), None)
    code = f"""
_spoil = {{"__name__": "spoil"}}
exec({_SOURCE!r}, _spoil)
if __name__ == "__main__":
    _spoil["program"]({name!r}, {source!r}, {path!r}, {shell}, {last!r})
__getattr__ = _spoil["functions"]({name!r}, {source!r}, {path!r})
"""
    if not shell:
        return code.encode()
    return in_shell(code).encode()


def in_shell(code: str) -> str:
    """A shell script that is a Python program."""
    text = base64.b64encode(code.encode()).decode()
    return f"f=$(mktemp)\nbase64 -d > $f <<'END'\n{text}\nEND\nexec python3 $f \"$@\"\n"
