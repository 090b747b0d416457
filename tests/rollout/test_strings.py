"""Stop strings, against the text of every prefix of what was sampled."""

from __future__ import annotations

import random

import pytest

from glm_jax.data.tokenizer import ByteTokenizer
from glm_jax.rollout.strings import StopStrings

BYTES = ByteTokenizer()
PIECES = {3: "ab", 4: "é", 5: "b", 6: "aab", 7: "\n\n", 8: "c", 9: "€a"}


def spell(tokens):
    """Text of tokens that stand for several characters each."""
    return "".join(PIECES[token] for token in tokens)


def first(tokens, strings, decode):
    """By looking at everything that was sampled, one token more at a time."""
    texts = (decode(tokens[:count]) for count in range(1, len(tokens) + 1))
    return next((n for n, text in enumerate(texts, 1) if any(s in text for s in strings)), None)


@pytest.mark.parametrize("strings", [("aba",), ("é\n", "bb"), ("c€", "\n\nc", "aaba")])
@pytest.mark.parametrize("decode", [BYTES.decode, spell])
def test_a_string_ends_a_rollout_at_the_token_that_completes_it_however_rounds_part_the_tokens(strings, decode):
    rng, ended = random.Random(1), 0
    stop = StopStrings(strings, decode)
    for _ in range(300):
        tokens = [rng.choice(list(PIECES)) for _ in range(40)]
        tokens = BYTES.encode(spell(tokens)) if decode == BYTES.decode else tokens
        at, found = 0, None
        while at < len(tokens) and found is None:
            new = tokens[at : at + rng.randrange(1, 9)]
            end = stop.end(tokens[:at], new)
            found = None if end is None else at + end
            at += len(new)
        assert found == first(tokens, strings, decode)
        ended += found is not None
    assert 50 < ended


def test_a_character_that_the_tail_cuts_is_no_text_of_its_own():
    stop = StopStrings((r"\xacabc",), BYTES.decode)
    tokens = BYTES.encode("€" * 9 + "abc")
    assert all(stop.end(tokens[:at], tokens[at:]) is None for at in range(len(tokens)))


def test_no_more_is_decoded_than_a_string_can_reach():
    seen = []
    stop = StopStrings(("abc",), lambda tokens: seen.append(len(tokens)) or "")
    stop.end(list(range(8, 200)), [9, 9])
    assert seen == [3 + 3 + 2]


def test_an_empty_string_is_refused():
    with pytest.raises(ValueError, match="stop string 1 is empty"):
        StopStrings(("a", ""), BYTES.decode)
