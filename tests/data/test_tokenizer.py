"""The byte tokenizer: one encoding per text, and nothing sampled can break its decoding."""

from __future__ import annotations

import pytest

from glm_jax.data.tokenizer import ByteTokenizer

TOKENIZER = ByteTokenizer()


@pytest.mark.parametrize("text", ["", "abc\n", "naïve 日本 🙂", "\x00\xff\x1b"])
def test_text_comes_back_as_it_was(text: str):
    ids = TOKENIZER.encode(text)
    assert TOKENIZER.decode(ids) == text
    assert all(8 <= i < TOKENIZER.vocab_size for i in ids)


def test_one_bos_and_one_eos_are_dropped_and_no_special_in_the_midst_is():
    bos, eos, pad = TOKENIZER.bos_id, TOKENIZER.eos_id, TOKENIZER.pad_id
    a, b = TOKENIZER.encode("ab")
    assert TOKENIZER.decode([bos, a, b, eos]) == "ab"
    assert TOKENIZER.decode([a, pad, b, eos]) == "a<pad>b"
    assert TOKENIZER.decode([a, eos, 3, b, eos, eos]) == "a<eos><tool_call>b<eos>"


def test_bytes_that_are_no_utf8_are_shown():
    assert TOKENIZER.decode([8 + 0xFF, 8 + ord("a"), 8 + 0xC3]) == "\\xffa\\xc3"


def test_an_id_outside_the_vocabulary_is_refused():
    with pytest.raises(ValueError, match="id 264 is outside the byte vocabulary of 264 ids"):
        TOKENIZER.decode([264])


def test_a_lone_surrogate_is_encoded_as_a_question_mark():
    assert TOKENIZER.decode(TOKENIZER.encode("a\ud800b")) == "a?b"
