"""What a run learns from, in an order that hangs on its seed alone and goes on where a checkpoint left it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from glm_jax.data.sft import Example
from glm_jax.data.tasks import Task
from glm_jax.host.batches import Document, example_document


class Prompts:
    """Training tasks, shuffled anew in each epoch. `position` counts the prompts that were given out."""

    def __init__(self, tasks: Sequence[Task], seed: int, position: int = 0):
        self.tasks, self.seed, self.position = tasks, seed, position
        self._order: tuple[int, np.ndarray] | None = None

    @property
    def epoch(self) -> float:
        """Passes over the tasks so far."""
        return self.position / len(self.tasks)

    def next(self) -> tuple[int, Task]:
        """The number of the prompt in the run's order, and its task."""
        number = self.position
        epoch, index = divmod(number, len(self.tasks))
        if self._order is None or self._order[0] != epoch:
            self._order = epoch, np.random.default_rng((self.seed, epoch)).permutation(len(self.tasks))
        self.position += 1
        return number, self.tasks[int(self._order[1][index])]


class Examples:
    """Supervised documents. `open()` makes the endless stream (data.sft.stream), only once it is needed."""

    def __init__(self, open: Callable[[], Any], count: int, state: dict | None = None):
        self._open, self.count = open, count
        self._stream: Any = None
        self.taken = state["taken"] if state else 0
        self._resume = state["stream"] if state else None
        self.waiting = [self._document(*parts) for parts in state["waiting"]] if state else []

    @property
    def epoch(self) -> float:
        return self.taken / max(1, self.count)

    def next(self, count: int) -> list[Document]:
        """`count` documents, those that did not fit the batch before first."""
        documents, self.waiting = self.waiting, []
        if self._stream is None:
            self._stream = self._open()
            if self._resume is not None:
                self._stream.set_state(self._resume)
        while len(documents) < count:
            example: Example = next(self._stream)
            self.taken += 1
            documents.append(self._document(example.prompt, example.answer, example.own))
        return documents

    def keep(self, documents: list[Document]) -> None:
        """Takes back what did not fit."""
        self.waiting = documents

    def state(self) -> dict:
        """What a checkpoint keeps, as JSON."""
        parts = lambda d: [x.tolist() for x in (d.tokens[: d.start], d.tokens[d.start :], d.trainable[d.start :])]
        stream = self._stream.get_state() if self._stream is not None else self._resume
        return {"taken": self.taken, "stream": stream, "waiting": [parts(document) for document in self.waiting]}

    def _document(self, prompt: Sequence[int], answer: Sequence[int], own: Sequence[bool]) -> Document:
        return example_document(self.taken, prompt, answer, own)
