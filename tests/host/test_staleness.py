"""The staleness rules, by hand and by a simulation that tries to break them."""

from __future__ import annotations

import itertools
import random

import pytest

from glm_jax.host.staleness import Choice, StalenessConfig, Unit, choose, most_units, stale

WAIT = lambda tau: StalenessConfig(tau, "wait")
DROP = lambda tau: StalenessConfig(tau, "drop")


def units(*pairs: tuple[int, bool]) -> list[Unit]:
    return [Unit(key, oldest, ready, (key,)) for key, (oldest, ready) in enumerate(pairs)]


def keys(found: tuple[Unit, ...]) -> list[int]:
    return [unit.key for unit in found]


def test_a_version_is_stale_iff_current_minus_oldest_exceeds_tau():
    for oldest, current, tau in itertools.product(range(6), range(6), range(4)):
        assert stale(oldest, current, tau) == (current - oldest > tau)


def test_batches_are_built_oldest_version_first():
    found = choose(units((3, True), (1, True), (2, True), (1, True)), 3, 2, WAIT(5))
    assert keys(found.train) == [1, 3]


def test_there_is_no_batch_before_enough_are_ready():
    assert choose(units((0, True), (0, False)), 0, 2, WAIT(1)) == Choice()


def test_an_update_waits_for_what_it_would_push_past_tau():
    flying = units((2, True), (2, True), (1, False))
    assert keys(choose(flying, 2, 2, WAIT(1)).wait) == [2]
    assert keys(choose(flying, 2, 2, WAIT(2)).train) == [0, 1]
    dropped = choose(flying, 2, 2, DROP(1))
    assert keys(dropped.train) == [0, 1] and keys(dropped.drop) == [2]


def test_an_update_waits_for_what_no_later_batch_could_take_in_time():
    # Four units of version 0 at version 1, tau 2, batches of 2: after this update only one more may come.
    late = units((1, True), (1, True), (0, False), (0, False), (0, False), (0, False))
    assert keys(choose(late, 1, 2, WAIT(2)).wait) == [2, 3, 4, 5]
    assert keys(choose(late[:-2], 1, 2, WAIT(2)).train) == [0, 1]


def test_steps_that_leave_the_version_push_nobody():
    flying = units((2, True), (0, False))
    assert keys(choose(flying, 2, 1, WAIT(2), bump=0).train) == [0]
    assert choose(flying, 2, 1, WAIT(2), bump=1).wait


def test_fewer_go_over_into_a_stage_of_smaller_batches():
    assert most_units(4, 2, None) == 12
    assert most_units(4, 2, 8) == 12
    assert most_units(16, 1, 4) == 16


@pytest.mark.parametrize("on_exceed", ["wait", "drop"])
@pytest.mark.parametrize("tau", [0, 1, 2, 5])
@pytest.mark.parametrize("spread", [2, 40])
def test_no_token_is_ever_trained_late_and_no_wait_lasts_for_ever(tau, on_exceed, spread):
    for seed in range(8):
        rng, batch, version, trained, dropped = random.Random(seed), rng_batch(seed), 0, 0, 0
        live: dict[int, list[int]] = {}  # key -> [oldest, rounds left]
        number = idle = 0
        while trained < 40 * batch:
            found = choose(
                [Unit(key, oldest, left <= 0, (key,)) for key, (oldest, left) in live.items()],
                version,
                batch,
                StalenessConfig(tau, on_exceed),
            )
            full = len(live)
            assert not found.wait or any(live[unit.key][1] > 0 for unit in found.wait), "waits for what is ready"
            for unit in found.train:
                assert version - live.pop(unit.key)[0] <= tau
            for unit in found.drop:
                assert version + 1 - live.pop(unit.key)[0] > tau
            dropped += len(found.drop)
            for _ in range(most_units(batch, tau, None) - full):
                live[number] = [version, rng.randint(1, spread)]
                number += 1
            assert len(live) <= (tau + 1) * batch
            for entry in live.values():
                entry[1] -= 1
            idle = 0 if found.train else idle + 1
            assert idle <= spread + 1, "no batch for longer than the longest rollout"
            if found.train:
                trained += len(found.train)
                version += 1
        assert dropped == 0 or on_exceed == "drop"


def rng_batch(seed: int) -> int:
    return 1 + seed % 5


def test_tau_below_zero_is_refused():
    assert StalenessConfig(tau=-1).check() == ["tau is -1; it counts versions, so it must be at least 0"]
