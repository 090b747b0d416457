"""Packs finished rollouts, or question and answer pairs, into the arrays of a learning batch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from glm_jax.data.packing import first_fit
from glm_jax.host.errors import RunError
from glm_jax.host.rollouts import Rollout
from glm_jax.learn.batch import LearnBatch, empty_batch


@dataclass(frozen=True)
class Document:
    """One row segment of a batch: a prompt, then trainable tokens and observations. Arrays are over all its tokens."""

    key: int
    tokens: np.ndarray  # int32[S]
    trainable: np.ndarray  # bool[S]
    logp: np.ndarray  # float32[S], 0 where not trainable
    version: np.ndarray  # int32[S], 0 over the prompt
    reward: float  # for the last trainable token: a reward, or an advantage where a baseline was taken off

    @property
    def start(self) -> int:
        """Tokens of the prompt."""
        return int(np.argmax(self.trainable)) if self.trainable.any() else len(self.tokens)


def rollout_document(rollout: Rollout, reward: float) -> Document:
    """A finished rollout with the figure it is to learn from."""
    start = len(rollout.prompt)
    return Document(
        key=rollout.id,
        tokens=np.concatenate([np.asarray(rollout.prompt, np.int32), np.asarray(rollout.tokens, np.int32)]),
        trainable=_after(start, rollout.sampled, np.bool_),
        logp=_after(start, rollout.logp, np.float32),
        version=_after(start, rollout.version, np.int32),
        reward=reward,
    )


def example_document(key: int, prompt: Sequence[int], answer: Sequence[int], own: Sequence[bool]) -> Document:
    """A question whose answer is to be learnt by cross-entropy, at the tokens that are its `own`."""
    tokens = np.concatenate([np.asarray(prompt, np.int32), np.asarray(answer, np.int32)])
    size = len(tokens)
    trainable = _after(len(prompt), own, np.bool_)
    return Document(key, tokens, trainable, np.zeros(size, np.float32), np.zeros(size, np.int32), 0.0)


def pack(documents: Sequence[Document], shape: tuple[int, int, int]) -> tuple[LearnBatch, list[Document]]:
    """First-fit into M micro-batches of R rows of C tokens; returns the batch and the documents that wait.

    A document stays within one row, so no rollout straddles two micro-batches. Raises RunError for a document that no
    empty row could hold, or that has nothing to train, or no prompt to predict its first token from.
    """
    micro_batches, rows, length = shape
    for document in documents:
        size = len(document.tokens)
        if size > length:
            raise RunError(f"document {document.key} has {size} tokens; a row of the batch holds {length}.")
        if not 0 < document.start < size:
            raise RunError(f"document {document.key} has {document.start} prompt tokens of {size}; it needs both.")
    batch = empty_batch(micro_batches, rows, length)
    places = _places(documents, shape)
    numbers = Counter[int]()
    for document, (row, column) in zip(documents, places, strict=True):
        if row >= 0:
            numbers[row] += 1
            _place(batch, divmod(row, rows), column, numbers[row], document)
    used = max(numbers) // rows + 1 if numbers else 0
    waiting = [document for document, (row, _) in zip(documents, places, strict=True) if row < 0]
    return batch.replace(used=np.asarray(used, np.int32)), waiting


def unpack(x: np.ndarray, documents: Sequence[Document]) -> dict[int, np.ndarray]:
    """By key, what an array [M, R, C] over the batch that `pack` makes of `documents` holds at their trainable tokens.

    Documents that `pack` lets wait are left out.
    """
    rows = x.reshape(-1, x.shape[-1])
    found = {}
    for document, (row, column) in zip(documents, _places(documents, x.shape), strict=True):
        if row >= 0:
            found[document.key] = rows[row, column : column + len(document.tokens)][document.trainable]
    return found


def _places(documents: Sequence[Document], shape: tuple[int, int, int]) -> list[list[int]]:
    """Row (of all M x R) and first column of each document; -1 where it has to wait."""
    micro_batches, rows, length = shape
    return first_fit([len(document.tokens) for document in documents], micro_batches * rows, length).tolist()


def _place(batch: LearnBatch, row: tuple[int, int], column: int, number: int, document: Document) -> None:
    where = (*row, slice(column, column + len(document.tokens)))
    batch.tokens[where] = document.tokens
    batch.document_ids[where] = number
    batch.rollout[where] = number
    batch.version[where] = document.version
    batch.behaviour_logp[where] = document.logp
    batch.trainable[where] = document.trainable
    batch.reward[where][np.flatnonzero(document.trainable)[-1]] = document.reward


def _after(start: int, values: Sequence[float], dtype: type) -> np.ndarray:
    return np.concatenate([np.zeros(start, dtype), np.asarray(values, dtype)])
