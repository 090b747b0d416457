"""An agent's answers on tape: recorded above the network, found again by what was asked.

A file of JSON lines holds, for each question, its key, the question itself and the answer; no header, no key of an API.
The key is of the model, the messages, the tools and the sampling, with what differs from run to run (temporary paths,
box user ids, times, ids of calls) written alike; the same question asked again finds the next answer to it.
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import json
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from glm_jax.envs.agents.chat import DEFAULT, ChatClient, ChatError, Message, Sampling, ToolCall, Turn, Usage

_ALIKE = (
    (re.compile(r"/tmp/[\w.-]+"), "/tmp/PATH"),
    (re.compile(r"\b6[0-4]\d{3}\b"), "UID"),
    (re.compile(r"\b\d{4}-\d\d-\d\d[T ]\d\d:\d\d(:\d\d(\.\d+)?)?(Z|[+-]\d\d:?\d\d)?"), "TIME"),
    (re.compile(r"\b(call|chatcmpl|toolu)[-_][\w-]+"), "ID"),
)


class Cassette:
    """A chat client that plays back `path`; what it lacks comes from `client`, if the mode allows.

    Modes: "replay" asks nobody; "record" asks for everything and begins the tape anew; "record-missing" asks for what
    the tape lacks.
    """

    def __init__(
        self,
        path: Path,
        model: str,
        mode: Literal["replay", "record", "record-missing"] = "replay",
        client: ChatClient | None = None,
    ) -> None:
        if (client is None) != (mode == "replay"):
            raise ValueError(f"mode {mode!r} {'wants' if client is None else 'takes no'} client")
        self._path, self._model, self._mode, self._client = path, model, mode, client
        self._lines: dict[str, list[dict]] = defaultdict(list)
        self._asked: dict[str, int] = defaultdict(int)
        if mode == "record":
            path.write_text("")
        elif path.exists():
            for line in path.read_text().splitlines():
                entry = json.loads(line)
                self._lines[entry["key"]].append(entry)
        elif mode == "replay":
            raise ChatError(f"there is no cassette {path}; record one first")

    async def chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] = (),
        sampling: Sampling = DEFAULT,
        meta: Mapping[str, Any] | None = None,
    ) -> Turn:
        question = _question(self._model, messages, tools, sampling)
        key = hashlib.sha256(question.encode()).hexdigest()
        number = self._asked[key]
        self._asked[key] += 1
        if number < len(self._lines[key]):
            return _turn(self._lines[key][number]["answer"])
        if self._client is None:
            raise ChatError(
                f"{self._path} has no answer number {number + 1} to this question; {self._nearest(question)}"
            )
        turn = await self._client.chat(messages, tools, sampling, meta)
        entry = {"key": key, "question": json.loads(question), "answer": dataclasses.asdict(turn)}
        self._lines[key].append(entry)
        with self._path.open("a") as file:
            file.write(json.dumps(entry) + "\n")
        return turn

    def _nearest(self, question: str) -> str:
        """How the question differs from the one on tape that is most like it."""
        taped = [_pretty(line["question"]) for lines in self._lines.values() for line in lines]
        if not taped:
            return "it holds none at all"
        asked = _pretty(json.loads(question))
        near = max(taped, key=lambda text: difflib.SequenceMatcher(None, text, asked, autojunk=False).quick_ratio())
        lines = difflib.unified_diff(near.splitlines(), asked.splitlines(), "on tape", "asked", lineterm="", n=1)
        return "the nearest differs:\n" + "\n".join(line[:300] for line in list(lines)[:40])


def _question(model: str, messages: Sequence[Message], tools: Sequence[Mapping], sampling: Sampling) -> str:
    """What was asked, as canonical JSON in which runs look alike."""
    question = {"model": model, "messages": messages, "tools": tools, "sampling": dataclasses.asdict(sampling)}
    return json.dumps(_alike(question), sort_keys=True)


def _alike(value: Any) -> Any:
    """The value with its texts written alike; not its JSON, in which a line break is a letter before what follows."""
    if isinstance(value, str):
        for pattern, same in _ALIKE:
            value = pattern.sub(same, value)
        return value
    if isinstance(value, Mapping):
        return {key: _alike(below) for key, below in value.items()}
    if isinstance(value, list | tuple):
        return [_alike(below) for below in value]
    return value


def _pretty(question: Any) -> str:
    return json.dumps(question, sort_keys=True, indent=1)


def _turn(data: dict[str, Any]) -> Turn:
    made = {key: tuple(value) if isinstance(value, list) else value for key, value in data.items()}
    made["tool_calls"] = tuple(ToolCall(**call) for call in data["tool_calls"])
    return Turn(**made | {"usage": Usage(**data["usage"])})
