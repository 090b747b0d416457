"""Text files that people bring along: UTF-8, with or without a byte order mark."""

from __future__ import annotations

import codecs
from pathlib import Path

# Longer marks first: that of UTF-32 begins with that of UTF-16.
_MARKS = {
    codecs.BOM_UTF32_LE: "UTF-32",
    codecs.BOM_UTF32_BE: "UTF-32",
    codecs.BOM_UTF16_LE: "UTF-16",
    codecs.BOM_UTF16_BE: "UTF-16",
}


class TextError(ValueError):
    """Bytes that are no UTF-8."""


def read_text(path: Path | str) -> str:
    """The text of a file, its line ends as they are. Raises OSError, or TextError that names file and encoding."""
    return decode(Path(path).read_bytes(), path)


def decode(data: bytes, name: Path | str) -> str:
    """The text of `data`, without a byte order mark. Raises TextError, which calls it `name`."""
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        found = f"no UTF-8 (byte {error.start} is {data[error.start]:#x})"
        marked = (f"{encoding} by its first bytes" for mark, encoding in _MARKS.items() if data.startswith(mark))
        raise TextError(f"{name} is {next(marked, found)}: save it as UTF-8") from None
