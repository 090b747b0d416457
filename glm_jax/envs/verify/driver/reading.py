"""What the driver reads of a candidate's data: bounded in bytes first, then in time, then in depth and parts."""

from __future__ import annotations

import json
import tomllib
from typing import Any

from patience import Failed, deadline

_DEEPEST = 50  # levels
_MOST = 200_000  # values
_LARGEST = 2 << 20  # bytes of JSON, which may take fifty times as many as values
_DOTS = 200  # in a line of TOML, whose reader takes the square of a key's parts


def read(path: str, limit: int = 1 << 20) -> bytes:
    """An artifact's bytes. Raises Failed where it is missing or too long."""
    try:
        with open(path, "rb") as file:
            data = file.read(limit + 1)
    except OSError as error:
        raise Failed(f"{path}: {error.strerror}") from error
    if len(data) > limit:
        raise Failed(f"{path} has more than {limit} bytes")
    return data


@deadline()
def parse(data: bytes) -> Any:
    """JSON as a value. Raises Failed where it is none, is too much, or nested so deeply that printing it would fail."""
    if len(data) > _LARGEST:
        raise Failed(f"JSON of {len(data)} bytes; {_LARGEST} are read")
    try:
        return _bounded(json.loads(data), "JSON")
    except (ValueError, RecursionError) as error:
        raise Failed(f"no JSON: {str(error)[:200]}: {data[:100]!r}") from error


@deadline()
def toml(path: str, limit: int = 1 << 16) -> dict[str, Any]:
    """A TOML file as a value. Raises Failed as `parse` does."""
    data = read(path, limit)
    if (dots := max((line.count(b".") for line in data.splitlines()), default=0)) > _DOTS:
        raise Failed(f"{path}: {dots} dots in a line; {_DOTS} are read")
    try:
        return _bounded(tomllib.loads(data.decode()), path)
    except (ValueError, RecursionError) as error:
        raise Failed(f"{path} is no TOML: {str(error)[:200]}") from error


def _bounded(value: Any, what: str) -> Any:
    level, found = [value], 1
    for _ in range(_DEEPEST):
        level = [
            below
            for one in level
            if isinstance(one, list | dict)
            for below in (one.values() if isinstance(one, dict) else one)
        ]
        found += len(level)
        if found > _MOST:
            raise Failed(f"{what}: more than {_MOST} values")
        if not level:
            return value
    raise Failed(f"{what}: nested more than {_DEEPEST} deep")
