"""The prefix tree against a list of everything it was told, and the device's holds against what the tree believes."""

from __future__ import annotations

import random

import pytest

from glm_jax.host.prefixes import Prefixes

PAGE = 3


def longest(told: dict[int, tuple], tokens: list[int], beyond: int) -> int:
    """Pages at the beginning of `tokens` that can be named, by comparing with every path of pages that is kept."""
    kept = set(told.values())
    count = 0
    while (end := (count + 1) * PAGE) <= len(tokens) - 1 and tuple(tokens[: end + beyond]) in kept:
        count += 1
    return count


@pytest.mark.parametrize("drafting", [False, True])
def test_matches_are_the_longest_there_are_and_every_page_is_either_kept_or_dropped(drafting):
    rng, beyond = random.Random(0), int(drafting)
    tree = Prefixes(PAGE, drafting)
    held: dict[int, tuple] = {}  # the device's holds: name -> tokens up to the page's end, and beyond
    believed: dict[int, tuple] = {}
    names = iter(range(10**6))
    for step in range(400):
        tokens = [rng.randrange(2) for _ in range(rng.randrange(1, 16))]
        matched = tree.match(tokens)
        assert len(matched) == longest(believed, tokens, beyond)
        for number, name in enumerate(matched):
            assert name in held and held[name] == tuple(tokens[: (number + 1) * PAGE + beyond])

        whole = (len(tokens) - beyond) // PAGE
        first = min(len(matched), whole)
        new = [next(names) for _ in range(whole - first)]
        paths = [tuple(tokens[: (first + i + 1) * PAGE + beyond]) for i in range(len(new))]
        held |= dict(zip(new, paths, strict=True))
        tree.add(tokens, first, new)
        known = set(believed.values())
        believed |= {name: path for name, path in zip(new, paths, strict=True) if path not in known}

        offer, drop = tree.offer(12)
        assert len(offer) <= 12 and len(set(offer)) == len(offer)
        taken = offer[: drop + rng.randrange(3)]
        for name in taken:
            held.pop(name, None)
        tree.given(taken)
        for name in taken:
            if path := believed.pop(name, None):
                below = [n for n, p in believed.items() if p[: len(path) - beyond] == path[: len(path) - beyond]]
                for n in below if not drafting else [n for n in below if p_of(believed[n], path)]:
                    believed.pop(n)
        assert len(tree) == len(believed)
        if step % 97 == 96:
            tree.clear()
            believed.clear()
            assert len(tree) == 0 and tree.match(tokens) == []
    tree.clear()
    while (offer := tree.offer(12))[0]:
        for name in offer[0]:
            held.pop(name, None)
        tree.given(offer[0][: offer[1]])
    assert not held, "every page that the device holds for the tree has been dropped"


def p_of(path: tuple, before: tuple) -> bool:
    """Whether a path goes on from another, the token beyond included."""
    return path[: len(before)] == before


def test_what_follows_a_page_is_given_up_before_it_and_the_longest_unused_first():
    tree = Prefixes(PAGE)
    one, two = [1] * 9, [2] * 6
    tree.add(one, 0, [10, 11, 12])
    tree.add(two, 0, [20, 21])
    tree.match([*one, 1])
    assert tree.offer(9) == ([21, 20, 12, 11, 10], 0)
    assert tree.offer(2) == ([21, 20], 0)


def test_pages_behind_one_that_was_given_up_meanwhile_are_dropped():
    tree = Prefixes(PAGE)
    tree.add([1] * 6, 0, [10, 11])
    tree.given([10])
    tree.add([1] * 9, 2, [12])
    assert tree.offer(9) == ([11, 12], 2)
    assert tree.match([1] * 10) == []


def test_what_the_tree_has_already_is_dropped_and_its_own_copy_stays():
    tree = Prefixes(PAGE)
    tree.add([1] * 6, 0, [10, 11])
    tree.add([1] * 9, 0, [20, 21, 22])
    assert tree.match([1] * 10) == [10, 11, 22]
    names, drop = tree.offer(9)
    assert names[:drop] == [20, 21]
