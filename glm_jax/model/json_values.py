"""Values of a JSON object read by type and range: each that does not fit is noted, so that all are told at once."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any

_WORDS = {None: "null", True: "true", False: "false"}


class JsonValues:
    """The keys of one object. A reader returns the value, or the default of a key that is absent or does not fit.

    `where` leads every key in `problems`, such as "rope_parameters.". Nothing is converted but a whole number to a
    float. null is refused except by keys that are read with `null=True`, where it stands for the default.
    """

    def __init__(self, values: Mapping[str, Any], where: str, problems: list[str]):
        self.values, self.where, self.problems = values, where, problems

    def whole(self, key: str, least: int, most: int, default: Any, null: bool = False) -> Any:
        fits = lambda v: type(v) is int and least <= v <= most
        return self._read(key, fits, f"a whole number from {least} to {most}", default, null)

    def number(self, key: str, least: float, most: float, default: Any, null: bool = False) -> Any:
        fits = lambda v: type(v) in (int, float) and least <= v <= most  # NaN is not
        value = self._read(key, fits, f"a number from {least:g} to {most:g}", default, null)
        return float(value) if type(value) is int else value

    def flag(self, key: str, default: bool, null: bool = False) -> bool:
        return self._read(key, lambda v: type(v) is bool, "true or false", default, null)

    def one_of(self, key: str, choices: Sequence[Any], default: Any, null: bool = False) -> Any:
        fits = lambda v: any(type(v) is type(choice) and v == choice for choice in choices)
        wanted = "one of " * (len(choices) > 1) + ", ".join(map(_text, choices))
        return self._read(key, fits, wanted, default, null)

    def words(self, key: str, letters: bool = False) -> Sequence[str] | None:
        """A list of words, or with `letters` a word of letters; None where it is absent or null."""
        of_words = lambda v: isinstance(v, (list, tuple)) and all(isinstance(word, str) for word in v)
        fits = lambda v: of_words(v) or (letters and isinstance(v, str))
        return self._read(key, fits, "a list of words" + letters * " or a text of letters", None, null=True)

    def object(self, key: str) -> Mapping[str, Any]:
        return self._read(key, lambda v: isinstance(v, Mapping), "an object", {}, null=True)

    def refuse_unknown(self, known: Sequence[str]) -> None:
        for key in sorted(self.values.keys() - set(known)):
            near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
            hint = f"did you mean {self.where}{near[0]}?" if near else f"known here: {', '.join(known)}"
            self.problems.append(f"{self.where}{key} is no known key; {hint}")

    def refuse_slips(self, known: Sequence[str], others: Sequence[str]) -> None:
        """Keys that are written nearly as one of `known`, but for `others`."""
        for key in sorted(self.values.keys() - {*known, *others}):
            if near := difflib.get_close_matches(key, known, n=1, cutoff=0.85):
                self.problems.append(f"{self.where}{key} is no known key; did you mean {self.where}{near[0]}?")

    def wrong(self, key: str, wanted: str) -> None:
        self.problems.append(f"{self.where}{key} is {show(self.values[key])}; it has to be {wanted}")

    def _read(self, key: str, fits, wanted: str, default: Any, null: bool) -> Any:
        value = self.values.get(key)
        if key not in self.values or (value is None and null):
            return default
        if fits(value):
            return value
        self.wrong(key, wanted)
        return default


def show(value: Any) -> str:
    """A value as a person finds it in the file, with its type; cut where it is long."""
    text = _text(value)
    kind = "" if text in _WORDS.values() or text == "nan" else f" ({type(value).__name__})"
    return (text if len(text) <= 80 else text[:77] + "...") + kind


def _text(value: Any) -> str:
    return next((word for constant, word in _WORDS.items() if value is constant), repr(value))
