"""A user's own tasks: one JSON object per line with a question, and an answer where there is one."""

from __future__ import annotations

import json
from dataclasses import dataclass

from glm_jax.data.errors import DataError
from glm_jax.text import TextError, read_text

SHOWN = 5  # problems named in an error; the rest is counted


@dataclass(frozen=True)
class Record:
    """A line: its `id` field or PATH:LINE, and the object itself, whose 'question' is a non-empty text."""

    id: str
    entry: dict


def read_jsonl(path: str) -> list[Record]:
    """The records of a file, blank lines left out.

    Raises DataError when the file cannot be read, holds nothing, or has lines that are no task (all counted).
    """
    try:
        text = read_text(path)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    except TextError as error:
        raise DataError(str(error)) from error
    records, problems = [], []
    # Not splitlines(): JSON texts may hold the other characters that it takes for line ends. To JSON a carriage return
    # is white space; it ends the lines of a file that has no other line ends.
    for number, line in enumerate(text.split("\n" if "\n" in text else "\r"), start=1):
        if not line.strip():
            continue
        found = _record(line, f"{path}:{number}")
        if isinstance(found, str):
            problems.append(f"  {path}:{number}: {found}")
        else:
            records.append(found)
    if problems:
        more = [f"  and {len(problems) - SHOWN} more"] if len(problems) > SHOWN else []
        raise DataError("\n".join([f"{path} has lines that are no task:", *problems[:SHOWN], *more]))
    if not records:
        raise DataError(f"{path} holds no task; it wants one JSON object with a 'question' per line")
    return records


def _record(line: str, place: str) -> Record | str:
    """The record of a line, or what is wrong with it."""
    try:
        entry = json.loads(line)
    except json.JSONDecodeError as error:
        return f"no JSON ({error})"
    if not isinstance(entry, dict):
        return f"a JSON {type(entry).__name__}; it has to be an object"
    question, answer = entry.get("question"), entry.get("answer")
    if not isinstance(question, str) or not question.strip():
        return f"'question' is {question!r}; it has to be a text that is not empty"
    if answer is not None and not isinstance(answer, str):
        return f"'answer' is {answer!r}; it has to be a text, or left out"
    return Record(str(entry.get("id", place)), entry)
