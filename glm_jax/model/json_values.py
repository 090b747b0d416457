"""Values of a JSON object read by type and range: each that does not fit is noted, so that all are told at once."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any


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
        wanted = choices[0] if len(choices) == 1 else f"one of {', '.join(map(repr, choices))}"
        return self._read(key, fits, f"{wanted!r}" if len(choices) == 1 else wanted, default, null)

    def object(self, key: str) -> Mapping[str, Any]:
        return self._read(key, lambda v: isinstance(v, Mapping), "an object", {}, null=True)

    def refuse_unknown(self, known: Iterable[str], cutoff: float) -> None:
        """Keys that are none of `known`: all of them, or with `cutoff` above 0 those that look like one."""
        known = set(known)
        for key in sorted(self.values.keys() - known):
            near = difflib.get_close_matches(key, known, n=1, cutoff=cutoff)
            if near:
                self.problems.append(f"{self.where}{key} is no known key; did you mean {self.where}{near[0]}?")
            elif not cutoff:
                self.problems.append(f"{self.where}{key} is no known key; known here: {', '.join(sorted(known))}")

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
    if value is None or value is True or value is False or (isinstance(value, float) and math.isnan(value)):
        return {None: "null", True: "true", False: "false"}.get(value, "NaN")
    text = repr(value)
    return f"{text if len(text) <= 80 else text[:77] + '...'} ({type(value).__name__})"
