"""How long rollouts become, by kind: a running estimate of what each will still sample."""

from __future__ import annotations

import bisect
import itertools
from collections import deque
from collections.abc import Iterable, Mapping, Sequence

KEPT = 256  # lengths of a kind: the estimate follows a policy whose answers grow or shrink


class Lengths:
    """The sampled tokens of the last rollouts of each kind that came to their end.

    Of one that has sampled n tokens E[l - n | l > n] more are expected: the mean over those remembered lengths l of its
    kind that are above n. Where none is, it is expected to double, as something without a scale would. A kind of which
    none has ended yet goes by all kinds together.
    """

    def __init__(self) -> None:
        self.restore({})

    def add(self, kind: str, length: int) -> None:
        """Takes in the length of a rollout that was not cut short."""
        self._last.setdefault(kind, deque(maxlen=KEPT)).append(length)
        self._all.append(length)
        self._tables.pop(kind, None)
        self._tables.pop(None, None)

    def remaining(self, kind: str, sampled: int, most: int) -> float:
        """Tokens, from 1 to `most`, that a rollout of this kind is expected to sample after the first `sampled`."""
        known = kind if kind in self._last else None
        lengths = self._last.get(kind, self._all)
        if not lengths:
            return float(most)
        if (table := self._tables.get(known)) is None:
            table = self._tables[known] = _table(lengths)
        ordered, above = table
        at = bisect.bisect_right(ordered, sampled)
        expected = above[at] / (len(ordered) - at) - sampled if at < len(ordered) else sampled
        return float(min(most, max(1, expected)))

    def state(self) -> dict[str, list[int]]:
        """What a checkpoint keeps, so that a resumed run sends its rollouts where the unbroken one does."""
        return {kind: list(lengths) for kind, lengths in self._last.items()}

    def restore(self, state: Mapping[str, Sequence[int]]) -> None:
        self._last = {kind: deque(lengths, KEPT) for kind, lengths in state.items()}
        self._all = deque((length for lengths in self._last.values() for length in lengths), KEPT)
        self._tables: dict[str | None, tuple[list[int], list[int]]] = {}


def _table(lengths: Iterable[int]) -> tuple[list[int], list[int]]:
    """The lengths in order, and for each the sum of it and all above."""
    ordered = sorted(lengths)
    return ordered, [*itertools.accumulate(reversed(ordered))][::-1]
