"""On TPU and GPU, where the kernels read the caches, the sampler gives what it gives on a CPU."""

from __future__ import annotations

import dataclasses
from functools import cache, partial

import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from glm_jax.model import cache as caches
from glm_jax.model import kernels
from pallas_kernels.index_select import reference as index_select_reference
from pallas_kernels.sparse_mla import reference, tpu
from tests.model.tiny import random_params, two_layers
from tests.rollout.driver import SIZES, Driver, some_requests

pytestmark = pytest.mark.rollout

MODEL = two_layers(kv_lora_rank=128, index_head_dim=128, num_nextn_predict_layers=1, index_share_for_mtp_iteration=True)


def sampled(platform: str, count: int = 6, page: int = 0) -> Driver:
    sizes = dataclasses.replace(SIZES, prefill_chunk=9, drafts=(3,), page=page)
    return Driver(sizes, MODEL, random_params(MODEL), platform).finish(some_requests(count))


@cache
def on_cpu(count: int = 6) -> Driver:
    return sampled("cpu", count)


def same(done: Driver, want: Driver) -> None:
    assert all(leaf.dtype == np.uint32 for leaf in (done.state.caches.row, done.state.drafting.caches.row))
    assert done.tokens == want.tokens and done.ending == want.ending
    for rollout, logp in done.logp.items():
        np.testing.assert_allclose(logp, want.logp[rollout], atol=2e-5)


@pytest.fixture
def counted(monkeypatch):
    """Queries per slot of every call; prompts are long enough to select from."""
    monkeypatch.setattr(caches, "DENSE_COLUMNS", 4)
    attend, found = kernels.attend_paged, set()
    monkeypatch.setattr(kernels, "attend_paged", lambda q, *rest: found.add(q.shape[1]) or attend(q, *rest))
    return found


@pytest.mark.parametrize("page", [0, 4, 16])
def test_slots_and_pages_packed_for_kernels_change_no_token(page, counted):
    want = on_cpu()
    assert not counted
    same(sampled("a platform that has no kernels", page=page), want)
    assert counted == {1, 4, 9}, "single tokens, drafts to be verified, pieces of prompts"


def test_the_tpu_kernels_in_the_sampler(counted, monkeypatch):
    want = on_cpu(2)
    monkeypatch.setattr(tpu, "paged", partial(tpu.paged, tile=16))
    for module, name in ((index_select_reference, "index_select_paged"), (reference, "paged")):
        monkeypatch.setattr(module, name, None)
    with pltpu.force_tpu_interpret_mode():
        same(sampled("tpu", 2, page=16), want)
    assert counted == {1, 4, 9}
