"""First-fit packing into rows."""

from __future__ import annotations

import numpy as np
import pytest

from glm_jax.data.errors import DataError
from glm_jax.data.packing import fill, first_fit, number_documents


def test_each_document_takes_the_first_row_with_room_and_what_does_not_fit_waits():
    places = first_fit([5, 4, 3, 4, 1], rows=2, length=8)
    assert places.tolist() == [[0, 0], [1, 0], [0, 5], [1, 4], [-1, -1]]
    assert first_fit([5, 4, 3, 5, 1], rows=2, length=8).tolist()[3:] == [[-1, -1], [1, 4]]


@pytest.mark.parametrize("size", [0, 9])
def test_a_document_that_no_row_could_hold_is_refused(size: int):
    with pytest.raises(DataError, match=f"document 1 has {size} tokens and a row holds 1 to 8"):
        first_fit([2, size], rows=4, length=8)


def test_documents_never_overlap_nor_leave_their_row_and_numbers_count_from_the_left():
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 12, size=60).tolist()
    places = first_fit(lengths, rows=16, length=20)
    counted = np.zeros((16, 20), np.int32)
    for size, (row, start) in zip(lengths, places, strict=True):
        if row >= 0:
            assert start + size <= 20
            counted[row, start : start + size] += 1
    assert counted.max() == 1
    assert counted.sum() > 0.9 * counted.size
    numbers = number_documents(lengths, places, rows=16, length=20)
    assert ((numbers > 0) == (counted == 1)).all()
    for row in numbers:
        seen = row[row > 0]
        assert (np.diff(seen) >= 0).all() and set(seen) == set(range(1, seen.max() + 1))


def test_values_land_in_their_places_and_the_rest_is_kept():
    documents = [np.array([1, 2, 3]), np.array([4, 5]), np.array([6])]
    into = np.full((1, 5), 9)
    fill(documents, first_fit([3, 2, 1], rows=1, length=5), into)
    assert into.tolist() == [[1, 2, 3, 4, 5]]
    into = np.full((2, 4), 9)
    fill(documents, first_fit([3, 2, 1], rows=2, length=4), into)
    assert into.tolist() == [[1, 2, 3, 6], [4, 5, 9, 9]]
