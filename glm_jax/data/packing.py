"""First-fit packing of documents into rows of fixed length, as plain arrays."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from glm_jax.data.errors import DataError


def first_fit(lengths: Sequence[int], rows: int, length: int) -> np.ndarray:
    """Places documents in their given order, each in the first row with room.

    Returns int32[n, 2]: row and first column of each document, or (-1, -1) for one that found no room and has to wait.
    A later, shorter document may still find room. Raises DataError for a document that no row could ever hold.
    """
    places = np.full((len(lengths), 2), -1, np.int32)
    used = np.zeros((rows,), np.int64)
    for number, size in enumerate(lengths):
        if not 0 < size <= length:
            raise DataError(
                f"document {number} has {size} tokens and a row holds 1 to {length}; shorten it, or lengthen the rows"
            )
        fits = np.flatnonzero(used + size <= length)
        if len(fits):
            places[number] = fits[0], used[fits[0]]
            used[fits[0]] += size
    return places


def fill(documents: Sequence[np.ndarray], places: np.ndarray, into: np.ndarray) -> None:
    """Writes each placed document's values (one per token) into `into[rows, length]`, in place; the rest is kept."""
    for document, (row, start) in zip(documents, places, strict=True):
        if row >= 0:
            into[row, start : start + len(document)] = document


def number_documents(lengths: Sequence[int], places: np.ndarray, rows: int, length: int) -> np.ndarray:
    """int32[rows, length]: 1, 2, ... for the documents of each row from left to right, 0 for padding."""
    numbers = np.zeros((rows, length), np.int32)
    count = np.zeros((rows,), np.int32)
    for size, (row, start) in zip(lengths, places, strict=True):
        if row >= 0:
            count[row] += 1
            numbers[row, start : start + size] = count[row]
    return numbers
