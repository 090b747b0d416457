"""Pages: who holds them, what yields when they run out, and that none of it changes a token."""

from __future__ import annotations

import dataclasses
from collections import Counter
from functools import cache

import jax
import numpy as np
import pytest

from glm_jax.rollout import admission, pages
from tests.rollout.driver import SIZES, Driver, some_requests
from tests.rollout.test_parking import OBSERVED, parking

pytestmark = pytest.mark.rollout


def paged(page: int = 4, pages: int = 0, **changes):
    return dataclasses.replace(SIZES, page=page, pages=pages, **changes)


class Paged(Driver):
    """Counts after every round anew who holds what, and keeps what a tree was told: names by rollout."""

    def __init__(self, *args):
        super().__init__(*args)
        self.told: dict[int, list[int]] = {}
        self.retracted = 0
        self.lost: list[int] = []

    def round(self, requests=(), cancel=(), offer=(), drop=0):
        log = super().round(requests, cancel, offer, drop)
        held = jax.device_get(self.state.pages)
        queue = jax.device_get(self.state.queue)
        for row in np.flatnonzero(held.news.rollout >= 0):
            rollout, first = int(held.news.rollout[row]), int(held.news.first[row])
            before = self.told.get(rollout, [None] * first)  # of which a request named the first
            assert len(before) >= first, "pages are told in order"
            self.told[rollout] = before[:first] + held.news.name[row, : held.news.count[row]].tolist()
        self.retracted += int(held.retracted[0])
        self.lost += held.lost[held.lost >= 0].tolist()
        count = Counter(np.flatnonzero(held.kept).tolist())
        for table, size in zip(held.table, held.held, strict=True):
            assert (table[size:] == held.name.size).all()
            count.update(table[:size].tolist())
        size = queue.requests.rollout.size
        for i in range(int(queue.requests.count[0])):
            row = (int(queue.head[0]) + i) % size
            count.update(queue.requests.pages[row, : queue.requests.shared[row]].tolist())
        assert held.holders.tolist() == [count[page] for page in range(held.name.size)]
        assert len({*held.name.tolist()}) == held.name.size
        return log

    def kept(self) -> set[int]:
        """Names that the tree holds on the device."""
        return {int(name) for name, kept in zip(self.state.pages.name, self.state.pages.kept, strict=True) if kept}

    def names(self, rollout: int, tokens: list[int]) -> dict:
        """A field of a request that begins with `tokens`, all of which `rollout` began with too."""
        return {"pages": self.told[rollout][: (len(tokens) - 1) // self.sizes.page]}


@cache
def finished() -> Driver:
    return Driver().finish(some_requests())


def same(done: Driver, want: Driver) -> None:
    assert done.tokens == want.tokens and done.ending == want.ending
    for rollout, logp in done.logp.items():
        np.testing.assert_allclose(logp, want.logp[rollout], atol=2e-6)


@pytest.mark.parametrize("page, pages, ticks", [(4, 60, 6), (3, 8, 1), (4, 5, 6), (20, 1, 64)])
def test_pages_their_number_and_yielding_them_change_no_token(page, pages, ticks):
    done = Paged(paged(page, pages, ticks=ticks)).finish(some_requests())
    same(done, finished())
    # With room for all slots, or for one rollout alone, nobody yields; in between the youngest do.
    assert (done.retracted > 0) == (pages in (5, 8))


def test_a_rollout_that_yields_goes_first_and_none_starves():
    done = Paged(paged(4, 5)).finish(some_requests())
    order = sorted(done.ending, key=lambda rollout: first_tick(done, rollout))
    assert order == sorted(order), "rollouts begin in the order of their requests"


def first_tick(done: Driver, rollout: int) -> tuple[int, int]:
    return next(
        (n, int(np.argwhere(log.rollout == rollout)[0, 0]))
        for n, log in enumerate(done.logs)
        if (log.rollout == rollout).any()
    )


def test_a_named_prefix_is_not_run_again_and_changes_nothing():
    first = Paged(paged(pages=60))
    first.finish(some_requests())
    wholes = {r: p + first.tokens[r] for r, p, *_ in some_requests()}
    # Later turns: what a rollout ended with, and more.
    later = [(r + 100, whole[:-2] + [5, 6, 7], 20, {}) for r, whole in wholes.items() if len(whole) < 16]
    assert len(later) >= 4
    want = Driver().finish(later)
    before = sum(int(u.prefilled) for u in first.usages)
    named = [(r, t, limit, first.names(r - 100, wholes[r - 100][:-2])) for r, t, limit, _ in later]
    first.finish(named)
    for rollout in want.tokens:
        assert first.tokens[rollout] == want.tokens[rollout]
        np.testing.assert_allclose(first.logp[rollout], want.logp[rollout], atol=1e-5)
    saved = sum(4 * len(more["pages"]) for *_, more in named)
    run = sum(int(u.prefilled) for u in first.usages) - before
    assert saved > 20 and run == sum(len(t) - 1 for _, t, *_ in later) - saved


def test_names_of_pages_that_went_to_others_are_not_believed():
    prompt = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]
    done = Paged(paged(pages=6))
    done.finish([(1, prompt, 13)])
    names = done.told[1]
    assert len(names) == 3
    # The tree offers them, and another rollout that wants the whole pool takes them up.
    done.round([(2, [7] * 10, 20)], offer=names[::-1])
    done.finish([(3, [8] * 10, 20)])
    before = sum(int(u.prefilled) for u in done.usages)
    done.finish([(4, prompt, 13, {"pages": names[:2]})])
    want = Driver().finish([(4, prompt, 13)])
    assert done.tokens[4] == want.tokens[4]
    assert sum(int(u.prefilled) for u in done.usages) == before + len(prompt) - 1


def test_the_tree_gives_up_in_its_order_and_only_as_much_as_is_wanted():
    done = Paged(paged(pages=6))
    done.finish([(1, [3, 1, 4, 1, 5, 9, 2, 6], 10), (2, [2, 7, 1, 8, 2, 8, 1, 8], 10)])
    assert [len(done.told[r]) for r in (1, 2)] == [2, 2]
    order = [done.told[2][1], done.told[1][1], done.told[2][0], done.told[1][0]]
    done.round([(3, [9] * 10, 20)], offer=order)  # wants 3 pages at once and another soon, and 2 are free
    assert sorted(done.lost) == sorted(order[:2]) and done.kept() & set(order) == set(order[2:])
    done.round(offer=order[2:], drop=1)
    assert order[2] not in done.kept()


def test_what_was_told_and_what_the_queue_names_yield_before_a_running_rollout_does():
    done = Paged(paged(pages=5, slots=1, prefill_slots=1, ticks=3))
    done.round([(1, [3, 1, 4, 1, 5, 9, 2, 6], 9)])
    names = done.told[1]
    # One slot: the second waits with pages that it names; the first wants them, and the tree offers nothing.
    done.finish([(2, [9] * 8, 20), (3, [3, 1, 4, 1, 5, 9, 2, 6, 1], 12, {"pages": names})])
    assert done.ending.keys() == {1, 2, 3} and done.retracted == 0


def test_an_update_makes_queued_requests_forget_what_they_named():
    for rewrite in (False, True):
        done = Paged(paged(pages=5, slots=1, prefill_slots=1, ticks=3))
        done.finish([(1, [3, 1, 4, 1, 5, 9, 2, 6], 9)])
        done.round([(2, [9] * 4, 20), (3, [3, 1, 4, 1, 5, 9, 2, 6, 1], 12, {"pages": done.told[1]})])
        assert int(done.state.queue.requests.shared.sum()) == 2 and int(done.state.slots.filled[0]) > 0
        outdate = jax.jit(admission.outdate, static_argnames="rewrite")
        same_state = outdate(done.state, np.bool_(False), rewrite=rewrite)
        jax.tree.map(np.testing.assert_array_equal, same_state, done.state)
        done.state = outdate(done.state, np.bool_(True), rewrite=rewrite)
        assert int(done.state.queue.requests.shared.sum()) == 0
        assert (int(done.state.slots.filled[0]) == 0) == rewrite
        done.finish()
        want = Driver().finish([(2, [9] * 4, 20), (3, [3, 1, 4, 1, 5, 9, 2, 6, 1], 12)])
        assert {r: done.tokens[r] for r in (2, 3)} == want.tokens


def test_a_parked_rollout_that_yields_comes_back_with_its_observation():
    request, sampled = parking(100, 2)
    rollout, prompt, limit, settings = request
    done = Paged(paged(pages=5))
    done.round([request])
    assert done.parked == {rollout}
    done.finish([(1, [9] * 3, 20)])
    assert done.retracted == 1 and int(done.state.slots.live.sum()) == 0
    whole, settings = prompt + sampled + OBSERVED, settings | {"park": -1}
    want = Driver().finish([(rollout, whole, limit, settings)])
    done.finish([(rollout, whole, limit, settings)])
    assert done.tokens[rollout] == sampled + want.tokens[rollout]


def test_pages_come_back_from_cancelled_rollouts_wherever_they_stand():
    done = Paged(paged(pages=6))
    done.finish([(1, [3, 1, 4, 1, 5, 9, 2, 6], 9)])
    done.round(
        [
            (2, [9] * 4, 20),
            (3, [8] * 4, 20),
            (4, [7] * 4, 20),
            (5, [3, 1, 4, 1, 5, 9, 2, 6, 1], 12, {"pages": done.told[1]}),
        ]
    )
    done.round(cancel=[2, 3, 4, 5])
    done.round([(6, [1], 4)])
    done.finish()
    kept = int(done.state.pages.kept.sum())
    done.round()
    assert int((done.state.pages.holders > 0).sum()) == kept


def test_names_begin_anew_before_they_overflow():
    last = np.iinfo(np.int32).max
    held = pages.init(2, 4, 2)
    held = held.replace(name=held.name + 4 * ((last - held.name) // 4))
    assert (held.name > last - 4).all()
    grown = jax.jit(pages.grow)(held, np.array([2, 1], np.int32), np.int32(0))
    assert grown.name[:3].tolist() == [0, 1, 2] and grown.name[3] == held.name[3]
