"""What must not change a token's logits: its row's neighbours, padding and whatever stands there, the batch's order."""

from __future__ import annotations

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from glm_jax.model import indexer, rows
from glm_jax.model.rows import positions
from glm_jax.model.transformer import as_documents, forward
from tests.model.tiny import random_params, random_tokens, tiny_config

CONFIG = tiny_config()
ROWS, COLUMNS = 4, 24  # documents of up to 20 tokens, index_topk 6
LENGTHS = (20, 3, 9, 11)
# Products of other shapes round otherwise, and each release of XLA in its own way: log-probs in float32 lie up to 5e-6
# from those in float64, where all shapes agree to 1e-14. A token that sees what it should not is off by 1e-3 or more.
ROUNDING = 2e-5


@pytest.fixture(params=["dense under a mask", "gathered, in chunks, half of the columns where no query sees more"])
def path(request, monkeypatch):
    """Both ways in which rows attend, as short and as long ones do."""
    if request.param != "dense under a mask":
        monkeypatch.setattr(rows, "DENSE_COLUMNS", 4)
        monkeypatch.setattr(rows, "QUERY_CHUNK", 7)
        monkeypatch.setattr(indexer, "FEWEST_COLUMNS", 4)


def compiled():
    return _compiled(rows.DENSE_COLUMNS)


@cache
def _compiled(_):
    params = random_params(CONFIG)
    run = jax.jit(lambda p, t, d: forward(p, CONFIG, t, d).logits)
    return params, lambda tokens, documents, p=params: np.asarray(run(p, tokens, documents))


def alone() -> tuple[np.ndarray, np.ndarray, list[np.ndarray]]:
    """Each document at the left of its own row, and its logits."""
    tokens = random_tokens(CONFIG, ROWS, COLUMNS)
    documents = (np.arange(COLUMNS) < np.array(LENGTHS)[:, None]).astype(np.int32)
    logits = compiled()[1](tokens, documents)
    return tokens, documents, [logits[b, :n] for b, n in enumerate(LENGTHS)]


@pytest.mark.usefixtures("path")
def test_a_packed_document_gives_what_it_gives_alone():
    tokens, _, want = alone()
    packed, documents = np.zeros_like(tokens), np.zeros_like(tokens)
    places = {0: (1, 0), 1: (1, 20), 2: (3, 1), 3: (3, 10)}  # document: row, first column
    for b, (row, at) in places.items():
        packed[row, at : at + LENGTHS[b]], documents[row, at : at + LENGTHS[b]] = tokens[b, : LENGTHS[b]], 9 - b
    logits = compiled()[1](packed, documents)
    for b, (row, at) in places.items():
        np.testing.assert_allclose(logits[row, at : at + LENGTHS[b]], want[b], atol=ROUNDING)


@pytest.mark.parametrize("shift", [1, 4])
def test_left_padding_changes_no_logit(shift):
    tokens, documents, want = alone()
    logits = compiled()[1](np.roll(tokens, shift, 1), np.roll(documents, shift, 1))
    for b, n in enumerate(LENGTHS):
        np.testing.assert_allclose(logits[b, shift : shift + n], want[b], atol=ROUNDING)


@pytest.mark.usefixtures("path")
def test_padding_content_changes_no_logit_not_even_a_nan_in_its_embedding():
    tokens, documents, want = alone()
    params, run = compiled()
    poisoned = params.replace(embed=params.embed.at[0].set(jnp.nan))
    for filler, used in ((7, params), (0, poisoned)):
        logits = run(np.where(documents > 0, tokens, filler), documents, used)
        for b, n in enumerate(LENGTHS):
            np.testing.assert_array_equal(logits[b, :n], want[b])


@pytest.mark.usefixtures("path")
def test_neither_the_order_nor_the_number_of_rows_changes_a_log_prob():
    tokens, documents, want = alone()
    for b, n in enumerate(LENGTHS):
        single = compiled()[1](tokens[b : b + 1], documents[b : b + 1])[0, :n]
        log_probs = [np.asarray(jax.nn.log_softmax(logits)) for logits in (single, want[b])]
        np.testing.assert_allclose(*log_probs, atol=ROUNDING)
    order = np.array([2, 0, 3, 1])
    logits = compiled()[1](tokens[order], documents[order])
    for row, b in enumerate(order):
        np.testing.assert_allclose(logits[row, : LENGTHS[b]], want[b], atol=ROUNDING)


def test_a_later_token_changes_no_earlier_logit():
    tokens, documents, want = alone()
    changed = tokens.copy()
    changed[0, 13] = (changed[0, 13] + 1) % CONFIG.vocab_size
    logits = compiled()[1](changed, documents)
    np.testing.assert_array_equal(logits[0, :13], want[0][:13])
    assert np.abs(logits[0, 13:20] - want[0][13:]).max() > 1e-3


def test_a_position_is_the_index_within_the_document_also_where_another_interrupts_it():
    documents = jnp.array([[0, 4, 4, 0, 4, 2, 2, 4, 0, 2], [1, 1, 1, 3, 3, 2, 2, 2, 0, 0]])
    want = [[0, 0, 1, 0, 2, 0, 1, 3, 0, 2], [0, 1, 2, 0, 1, 0, 1, 2, 0, 0]]
    np.testing.assert_array_equal(positions(documents), want)


def test_a_mask_means_document_one_and_nothing_means_all_of_it():
    tokens = random_tokens(CONFIG, 2, 5)
    np.testing.assert_array_equal(as_documents(None, tokens), np.ones((2, 5)))
    mask = np.array([[False, True, True, True, False]] * 2)
    np.testing.assert_array_equal(as_documents(mask, tokens), mask.astype(int))
    with pytest.raises(ValueError, match=r"document_ids has shape \(2, 4\), tokens \(2, 5\)"):
        as_documents(mask[:, :4], tokens)
