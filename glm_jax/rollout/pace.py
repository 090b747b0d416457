"""How deep to draft: the depth that has given the most tokens per second lately, 0 where drafting does not pay."""

from __future__ import annotations

TRIAL = 64  # rounds after which each of the other depths is measured again
MARGIN = 1.05  # by so much drafting has to be faster than none: measurements scatter
MEMORY = 0.5  # weight of the newest measurement of a depth in its mean


class Pace:
    """Measures every depth once, deepest first; goes on with the best, and tries the others again now and then.

    What is drafted changes no distribution, but it does change which tokens are drawn: where a run has to give the same
    bits again, `fixed` keeps it to the deepest.
    """

    def __init__(self, drafts: tuple[int, ...], fixed: bool = False):
        self.depths = (0, *drafts)
        self.fixed = fixed
        self.speed: dict[int, float] = {}  # tokens per second
        self._rough: set[int] = set()  # depths of which there is but a guess
        self._trials: list[int] = []
        self._since = 0

    @property
    def best(self) -> int:
        """The fastest depth so far, 0 where another is hardly faster; the deepest while nothing is known."""
        worth = {depth: speed / (MARGIN if depth else 1) for depth, speed in self.speed.items()}
        return max(worth, key=worth.__getitem__, default=self.depths[-1])

    @property
    def chooses(self) -> bool:
        """Whether the depth hangs on what was measured."""
        return len(self.depths) > 1 and not self.fixed

    @property
    def knows(self) -> bool:
        """Whether there is at least a guess of every depth."""
        return not self.chooses or len(self.speed) == len(self.depths)

    @property
    def settled(self) -> bool:
        """Whether every depth was measured."""
        return self.knows and not self._rough

    def next(self) -> int:
        """The depth of the next round."""
        if not self.chooses:
            return self.depths[-1]
        for some in (set(self.depths) - set(self.speed), self._rough):
            if some:
                return max(some)
        if self._since >= TRIAL:
            self._trials, self._since = [depth for depth in self.depths if depth != self.best], 0
        if self._trials:
            return self._trials.pop()
        self._since += 1
        return self.best

    def guess(self, depth: int, tokens: int, seconds: float) -> None:
        """What a part of a round of this depth took: it stands until a whole one was measured."""
        if tokens and seconds > 0:
            self.speed[depth] = tokens / seconds
            self._rough.add(depth)

    def add(self, depth: int, tokens: int, seconds: float) -> None:
        """What a round of this depth took; rounds that sampled nothing tell nothing."""
        if tokens and seconds > 0:
            old = None if depth in self._rough else self.speed.get(depth)
            new = tokens / seconds
            self.speed[depth] = new if old is None else MEMORY * new + (1 - MEMORY) * old
            self._rough.discard(depth)
