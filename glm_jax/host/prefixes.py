"""Which pages hold which tokens: the host's view of what one device has kept for later requests to begin with."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field


@dataclass(eq=False)
class _Node:
    """A page, and those that follow it. used: when it was last told of or named."""

    name: int
    parent: _Node | None
    key: tuple[int, ...]
    used: int = 0
    depth: int = 0
    children: dict[tuple[int, ...], _Node] = field(default_factory=dict)


class Prefixes:
    """A radix tree over token ids, one page per edge, of what the present weights have computed.

    The device holds each page of the tree until the tree has given it up. That goes by an offer: a list of names, of
    which the first are dropped at once and the others, longest unused first, when their pages are wanted. With
    `drafting` pages agree only if the token after them does: the draft layer's last row of a page saw it.
    """

    def __init__(self, page: int, drafting: bool = False):
        self.page, self.beyond = page, int(drafting)
        self._root = _Node(-1, None, ())
        self._nodes: dict[int, _Node] = {}
        self._drop: list[int] = []
        self._clock = 0

    def __len__(self) -> int:
        """Pages in the tree."""
        return len(self._nodes)

    def match(self, tokens: Sequence[int]) -> list[int]:
        """Names of the pages that hold the longest beginning of `tokens`, the last token apart."""
        self._clock += 1
        node, names = self._root, []
        for key in self._keys(tokens[: len(tokens) - 1 + self.beyond]):
            if (node := node.children.get(key)) is None:
                break
            node.used = self._clock
            names.append(node.name)
        return names

    def add(self, tokens: Sequence[int], first: int, names: Sequence[int]) -> None:
        """Takes in what the device told: `names` hold the pages of `tokens` from page `first` on; -1: lost meanwhile.

        What the tree has already, or cannot reach because it gave up what comes before, it drops.
        """
        self._clock += 1
        node, left = self._root, list(names)
        for number, key in enumerate(self._keys(tokens)):
            if not left:
                break
            found = node.children.get(key)
            if number >= first:
                name = left.pop(0)
                if found is None and name >= 0:
                    found = node.children[key] = _Node(name, node, key, depth=node.depth + 1)
                    self._nodes[name] = found
                else:
                    self.refuse([name])
            if found is None:
                break
            found.used = self._clock
            node = found
        self.refuse(left)

    def offer(self, size: int) -> tuple[list[int], int]:
        """Up to `size` names to give up, and how many of them are dropped at once. Nothing is named before its parent's
        other pages: what follows a page goes before it."""
        drop, self._drop = self._drop[:size], self._drop[size:]
        rest = sorted(self._nodes.values(), key=lambda node: (node.used, -node.depth))
        return [*drop, *(node.name for node in rest[: size - len(drop)])], len(drop)

    def given(self, names: Sequence[int]) -> None:
        """The device has let go of these pages; those that followed them are dropped."""
        for name in names:
            if node := self._nodes.get(name):
                node.parent.children.pop(node.key)
                gone = [child.name for child in self._below(node)]
                self._drop += gone
                for each in (name, *gone):
                    del self._nodes[each]

    def clear(self) -> None:
        """The weights have changed: nothing matches any more."""
        self._drop += self._nodes
        self._nodes.clear()
        self._root.children.clear()

    def refuse(self, names: Sequence[int]) -> None:
        """Takes note of pages that the device holds for the tree, to drop them: they are of older weights."""
        self._drop += [name for name in names if name >= 0]

    def _keys(self, tokens: Sequence[int]) -> Iterator[tuple[int, ...]]:
        for end in range(self.page, len(tokens) - self.beyond + 1, self.page):
            yield tuple(tokens[end - self.page : end + self.beyond])

    def _below(self, node: _Node) -> Iterator[_Node]:
        for child in node.children.values():
            yield child
            yield from self._below(child)
