"""Tool calls as tokens: the one place that knows how a policy writes them, and how it is told what came of them.

    <tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value> ... </tool_call>

as in GLM's chat format. `</tool_call>` is the id that parks the rollout; its answer goes on with

    <|observation|><tool_response>TEXT</tool_response><|assistant|>

A tag is one special id. Of those, `<tool_call>`, `</tool_call>`, `<arg_key>`, `<arg_value>` and `</tool_response>` are
needed; the byte tokenizer has these alone, and the others are left out where a tokenizer has none. Calls are read id by
id: a tag that an argument or a result spells in letters is text, and closes nothing. A tag where none belongs makes a
call malformed: a value that was cut at it would be carried out as if it were whole.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from glm_jax.data.tokenizer import Tokenizer
from glm_jax.envs.agents.chat import ToolCall
from glm_jax.envs.agents.tools import typed
from glm_jax.host.errors import RunError

OPEN, CLOSE, KEY, VALUE = "<tool_call>", "</tool_call>", "<arg_key>", "<arg_value>"
_KEY_END, _VALUE_END, _RESPONSE_END = "</arg_key>", "</arg_value>", "</tool_response>"
_BEFORE, _AFTER = ("<|observation|>", "<tool_response>"), (_RESPONSE_END, "<|assistant|>")


class Malformed(ValueError):
    """Tokens that end as a call does and are none: the message tells the policy what is wrong."""


def check(tokenizer: Tokenizer) -> None:
    """Raises RunError where the tokenizer cannot write calls."""
    if missing := [tag for tag in (OPEN, CLOSE, KEY, VALUE, _RESPONSE_END) if tag not in tokenizer.tags]:
        raise RunError(
            f"the tokenizer has no special token {', '.join(missing)}, which tool calls are made of: use a model whose "
            "tokenizer has them (GLM-4.5 and later), or none, for bytes."
        )


def parse(turn: Sequence[int], tokenizer: Tokenizer) -> ToolCall:
    """The call that a turn ends with; what stands before it is the policy's own. Raises Malformed."""
    tags = tokenizer.tags
    if turn[-1] != tags[CLOSE] or tags[OPEN] not in turn:
        raise Malformed(f"{CLOSE} closes no {OPEN}")
    name, *arguments = _split(turn[turn.index(tags[OPEN]) + 1 : -1], tags[KEY])
    _check_tags(name, "the call's name", tokenizer)
    found: dict[str, str] = {}
    for argument in arguments:
        key, *values = _split(argument, tags[VALUE])
        key_text = tokenizer.decode(_until(key, _KEY_END, "a key", tokenizer)).strip()
        if len(values) != 1:
            raise Malformed(f"argument {key_text!r} has {len(values)} values; each {KEY} is followed by one {VALUE}")
        if key_text in found:
            raise Malformed(f"argument {key_text!r} is given twice")
        value = f"the value of {key_text!r}"
        if _VALUE_END in tags and tags[_VALUE_END] not in values[0]:
            raise Malformed(f"{value} is not closed by {_VALUE_END}")
        found[key_text] = tokenizer.decode(_until(values[0], _VALUE_END, value, tokenizer))
    text = tokenizer.decode(name).strip()
    return ToolCall("", text, json.dumps(typed(text, found)))


def write(name: str, arguments: Mapping[str, Any], tokenizer: Tokenizer) -> list[int]:
    """The ids of a call."""
    ids = [*_tags((OPEN,), tokenizer), *tokenizer.plain(name)]
    for key, value in arguments.items():
        text = value if isinstance(value, str) else json.dumps(value)
        ids += [*_tags((KEY,), tokenizer), *tokenizer.plain(key), *_tags((_KEY_END, VALUE), tokenizer)]
        ids += [*tokenizer.plain(text), *_tags((_VALUE_END,), tokenizer)]
    return [*ids, *_tags((CLOSE,), tokenizer)]


def response(text: str, tokenizer: Tokenizer, most: int) -> list[int]:
    """The ids of an observation; of a text of more than `most` ids, head and tail with what is left out between."""
    ids = tokenizer.plain(text)
    if len(ids) > most:
        cut = tokenizer.plain(f"[{len(ids)} tokens, middle cut]")[:most]
        head = (most - len(cut) + 1) // 2
        ids = [*ids[:head], *cut, *ids[len(ids) - (most - len(cut) - head) :]]
    return [*_tags(_BEFORE, tokenizer), *ids, *_tags(_AFTER, tokenizer)]


def turns(tokens: Sequence[int], sampled: Sequence[int], tokenizer: Tokenizer) -> Iterator[list[int]]:
    """The turns of a rollout that end with a call, each from the observation before it."""
    turn: list[int] = []
    for token, own in zip(tokens, sampled, strict=True):
        if own:
            turn.append(token)
            if token == tokenizer.tags[CLOSE]:
                yield turn
                turn = []


def _split(ids: Sequence[int], at: int) -> list[list[int]]:
    parts: list[list[int]] = [[]]
    for id in ids:
        parts.append([]) if id == at else parts[-1].append(id)
    return parts


def _until(ids: list[int], end: str, what: str, tokenizer: Tokenizer) -> list[int]:
    """What stands before the tag `end`, after which only white space may follow; all where there is no such tag."""
    at = ids.index(tokenizer.tags[end]) if tokenizer.tags.get(end) in ids else len(ids)
    if rest := tokenizer.decode(ids[at + 1 :]).strip():
        raise Malformed(f"{end} closes {what}, and {rest[:40]!r} follows: {what} may not hold that tag")
    _check_tags(ids[:at], what, tokenizer)
    return ids[:at]


def _check_tags(ids: list[int], what: str, tokenizer: Tokenizer) -> None:
    """Raises Malformed where one of the tags of calls stands in `ids`."""
    if held := [tag for tag in (OPEN, _KEY_END, _VALUE_END) if tokenizer.tags.get(tag) in ids]:
        raise Malformed(f"{held[0]} stands in {what}")


def _tags(names: Sequence[str], tokenizer: Tokenizer) -> list[int]:
    return [tokenizer.tags[name] for name in names if name in tokenizer.tags]
