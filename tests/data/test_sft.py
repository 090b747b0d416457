"""The supervised stream: whole epochs, shuffled by seed, going on from a saved state."""

from __future__ import annotations

import json

import pytest

from glm_jax.data.errors import DataError
from glm_jax.data.sft import examples, stream
from glm_jax.data.tasks import Task
from glm_jax.data.tokenizer import ByteTokenizer

TOKENIZER = ByteTokenizer()
TASKS = [Task(f"t{i}", f"{i}+1=", str(i + 1), "jsonl", {}) for i in range(10)]


def names(iterator, count: int) -> list[str]:
    return [next(iterator).task for _ in range(count)]


def test_an_example_is_prompt_then_answer_with_eos():
    first = examples(TASKS, TOKENIZER, window=8)[0]
    assert TOKENIZER.decode(first.prompt) == "0+1="
    assert first.answer.tolist() == [*TOKENIZER.encode("1"), TOKENIZER.eos_id]
    assert first.prompt.dtype == first.answer.dtype == "int32"


def test_each_epoch_holds_every_example_once_in_an_order_of_its_own():
    found = examples(TASKS, TOKENIZER, window=8)
    order = names(stream(found, seed=0), 20)
    assert sorted(order[:10]) == sorted(order[10:]) == sorted(task.id for task in TASKS)
    assert order[:10] != order[10:]
    assert order == names(stream(found, seed=0), 20)
    assert order != names(stream(found, seed=1), 20)


@pytest.mark.parametrize("position", [0, 7, 13])
def test_a_saved_state_goes_on_where_the_stream_stood(position: int):
    found = examples(TASKS, TOKENIZER, window=8)
    unbroken = stream(found, seed=3)
    names(unbroken, position)
    state = json.loads(json.dumps(unbroken.get_state()))
    resumed = stream(found, seed=3)
    resumed.set_state(state)
    assert names(resumed, 15) == names(unbroken, 15)


def test_what_cannot_be_learnt_from_is_refused_with_its_task():
    with pytest.raises(DataError, match="task 't0' has 4 prompt and 2 answer tokens, more than the window of 5"):
        examples(TASKS, TOKENIZER, window=5)
    with pytest.raises(DataError, match="task 'x' has no answer to learn from"):
        examples([Task("x", "q", None, "jsonl", {})], TOKENIZER, window=5)
    with pytest.raises(DataError, match="there is no task"):
        examples([], TOKENIZER, window=5)
