"""Stop strings: text that ends a rollout, looked for in what its last tokens say."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

_CUT = 3  # most tokens by which a tail may cut into a character: one of four bytes


@dataclass(frozen=True)
class StopStrings:
    """Strings that each end a rollout at the token that completes it; what of that token stands behind is kept.

    Every token is taken to stand for a byte at least, so that a string of n bytes lies within n tokens.
    """

    strings: tuple[str, ...]
    decode: Callable[[Iterable[int]], str]

    def __post_init__(self) -> None:
        if problems := check(self.strings):
            raise ValueError("; ".join(problems))

    @property
    def reach(self) -> int:
        """Tokens before those that are new which `end` wants to see, if there are so many."""
        return max((len(text.encode()) for text in self.strings), default=0) + _CUT

    def end(self, before: Sequence[int], new: Sequence[int]) -> int | None:
        """How many of the `new` tokens there are up to the first that completes a string; None: none does.

        `before`: the tokens of the same turn before them; more than the last `reach` are not looked at.
        """
        tail = list(before[-self.reach :])
        if not self._in([*tail, *new]):
            return None
        return next(count for count in range(1, len(new) + 1) if self._in([*tail, *new[:count]]))

    def _in(self, tokens: Sequence[int]) -> bool:
        text = self.decode(tokens)
        return any(stop in text for stop in self.strings)


def check(strings: Sequence[str]) -> list[str]:
    """One sentence for each string that cannot end anything."""
    return [f"stop string {i} is empty: it would end every rollout" for i, text in enumerate(strings) if not text]
