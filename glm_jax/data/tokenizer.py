"""Text to ids and back: a model folder's own tokenizer, or bytes, where there is nothing to download."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Protocol

# Ids below FIRST_BYTE are special; 3 to 7 are the tags of tool calls that a parser cannot do without.
PAD, BOS, EOS, FIRST_BYTE = 0, 1, 2, 8
_TAGS = ("<tool_call>", "</tool_call>", "<arg_key>", "<arg_value>", "</tool_response>")
_NAMES = {PAD: "<pad>", BOS: "<bos>", EOS: "<eos>"} | {3 + i: tag for i, tag in enumerate(_TAGS)}


class Tokenizer(Protocol):
    """What the other rooms use of a tokenizer."""

    vocab_size: int
    eos_id: int  # ends an answer in supervised examples
    stop_ids: tuple[int, ...]  # each ends a sampled answer; eos_id first
    tags: Mapping[str, int]  # special tokens by their text: among them those of tool calls

    def fits(self, vocab_size: int) -> bool: ...
    def encode(self, text: str) -> list[int]: ...
    def plain(self, text: str) -> list[int]: ...  # as encode, of a text in which no special token is meant
    def decode(self, ids: Iterable[int]) -> str: ...


def tokenizer_of(folder: str | Path | None) -> Tokenizer:
    """The tokenizer of a model folder; bytes where it has none, or there is no folder."""
    from glm_jax.data.file_tokenizer import FILE, FileTokenizer

    if folder is not None and (Path(folder) / FILE).is_file():
        return FileTokenizer(Path(folder))
    return ByteTokenizer()


class ByteTokenizer:
    """UTF-8 bytes as ids 8 to 263; 0 is padding, 1 begins a document, 2 ends an answer, 3 to 7 are tags of tool calls.

    Every text has exactly one encoding.
    """

    vocab_size = FIRST_BYTE + 256
    pad_id = PAD
    bos_id = BOS
    eos_id = EOS
    stop_ids = (EOS,)
    tags = {name: id for id, name in _NAMES.items()}

    def fits(self, vocab_size: int) -> bool:
        """Whether a model of so many ids can be read: it must have these, and no other that it could sample."""
        return self.vocab_size == vocab_size

    def encode(self, text: str) -> list[int]:
        """The ids of `text`, without bos or eos. A lone surrogate, which UTF-8 cannot write, becomes '?'."""
        return [FIRST_BYTE + byte for byte in text.encode("utf-8", errors="replace")]

    plain = encode  # no text has a special id

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`. One bos in front and one eos at the end are dropped.

        Every other special id is shown (`<pad>`), so that an answer with one in its midst equals no clean
        answer, and bytes that are no UTF-8 are shown as `\\xff`. Raises ValueError for an id outside the vocabulary.
        """
        ids = [int(i) for i in ids]
        ids = ids[1:] if ids[:1] == [BOS] else ids
        ids = ids[:-1] if ids[-1:] == [EOS] else ids
        raw = bytearray()
        for i in ids:
            if not 0 <= i < self.vocab_size:
                raise ValueError(f"id {i} is outside the byte vocabulary of {self.vocab_size} ids")
            raw += bytes([i - FIRST_BYTE]) if i >= FIRST_BYTE else _NAMES[i].encode()
        return raw.decode("utf-8", errors="backslashreplace")
