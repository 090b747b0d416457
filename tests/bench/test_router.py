"""The simulated fleet against the sampler itself, by hand, and within the bounds that the router promises."""

from __future__ import annotations

import dataclasses
import json

import pytest

from glm_jax.bench import router
from glm_jax.bench.fleet import Work, draw, simulate
from glm_jax.learn.config import LearnConfig
from glm_jax.model.hf_config import from_hf
from glm_jax.program.round import build
from glm_jax.rollout.config import RolloutConfig
from glm_jax.sharding.mesh import MeshConfig, make_mesh

ONE = RolloutConfig(slots=1, window=100, ticks=4, queue=2, requests=2, prefill_slots=1)
LAYERS = {**router.MODEL, "num_hidden_layers": 2}  # quick to compile


def work(*lengths):
    return Work(lengths, ["a"] * len(lengths))


def test_a_slot_takes_the_next_rollout_at_once_while_its_queue_holds_one():
    found = simulate(ONE, 1, work(3, 2, 6), at_once=3, batchwise=False)
    # The queue takes two; the third is sent in the second round, at tick 4, and starts when the second has ended.
    assert (found.ticks, found.idle, found.used) == (11, 0, 1)
    assert (found.wait_median, found.wait_most) == (3, 5)


def test_slots_are_idle_while_a_batch_waits_for_its_longest():
    sizes = dataclasses.replace(ONE, slots=2)
    found = simulate(sizes, 1, work(1, 9, 2, 2), at_once=2, batchwise=True)
    # Of 9 ticks one slot works in one; the second batch starts at tick 9, with nothing waiting behind it.
    assert found.ticks == 11 and found.idle == pytest.approx(8 / 18)


def test_idle_slots_count_while_a_request_waits_at_another_shard():
    found = simulate(ONE, 2, work(1, 4, 4), at_once=3, batchwise=False)
    # The third goes to the first shard, at tick 1; nothing waits after that.
    assert (found.idle, found.ticks) == (0, 5)
    found = simulate(ONE, 2, work(4, 1, 4), at_once=3, batchwise=False)
    # It goes to the first shard again, with nothing known of lengths, while the second is free from tick 1 to 4.
    assert found.idle == pytest.approx(3 / 8)


def test_slots_of_a_fleet_are_hardly_idle_where_batches_leave_most_of_them_so():
    found = router.of_fleet(router.FULL, 8)
    assert found["as slots free"].idle <= 0.03 and found["batch-wise"].idle > 0.5
    assert found["as slots free"].ticks < found["batch-wise"].ticks / 3


@pytest.mark.parametrize("shards", [1, 3])
def test_nobody_waits_for_more_than_a_round_of_the_host_and_the_places_of_a_queue(shards):
    sizes = RolloutConfig(slots=4, window=60, ticks=10, queue=8, requests=8, prefill_slots=1)
    some = draw(400, (4, 40), sizes.window, seed=1)
    most = 8 * shards + 4 * shards
    found = simulate(sizes, shards, some, at_once=most, batchwise=False)
    # What is open fits slots and queues: 8 rollouts go before it in a queue, each a slot for at most 60 ticks.
    assert found.wait_most <= 60 * (1 + 8 / 4) + 2 * sizes.ticks


@pytest.mark.rollout
@pytest.mark.parametrize("batchwise", [False, True])
def test_the_sampler_itself_takes_the_ticks_that_are_simulated(batchwise):
    sizes = RolloutConfig(slots=4, window=50, ticks=8, queue=4, requests=4, prefill_slots=4, prefill_chunk=8)
    some = draw(30, (4, 16), sizes.window - 1, seed=2)
    program = build(from_hf(LAYERS), sizes, LearnConfig(advantage="running_mean"), make_mesh(MeshConfig()))
    found = router.sample(program, sizes, some, batchwise)
    assert found == simulate(sizes, 1, some, router.OPEN * sizes.slots, batchwise)
    assert 0 < found.idle < 1


@pytest.mark.rollout
def test_the_bench_tells_what_it_found(tmp_path, monkeypatch):
    monkeypatch.setattr(router, "MODEL", LAYERS)
    table = router.run(1, tmp_path / "found.json", smoke=True)
    figures = json.loads((tmp_path / "found.json").read_text())
    for found in (*figures["simulated"].values(), figures["sampler"]):
        for name, one in found.items():
            assert f"| {name} | {one['idle']:.1%} | {one['used']:.1%} |" in table
    assert all(speed > 0 for speed in figures["tokens_per_second"].values())
