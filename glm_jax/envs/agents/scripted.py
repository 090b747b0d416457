"""An agent that says what it was given to say: oracles, partial solutions and attackers, without a model."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from glm_jax.envs.agents.chat import DEFAULT, ChatError, Message, Sampling, ToolCall, Turn
from glm_jax.envs.sandbox.files import File
from glm_jax.text import decode

_PLACE = "/tmp/script"


class Scripted:
    """Answers with `turns` in order. A turn may come with a pattern that the last message has to match."""

    def __init__(self, turns: Iterable[Turn | tuple[str, Turn]]) -> None:
        self._turns = iter(turns)
        self._said = 0

    async def chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] = (),
        sampling: Sampling = DEFAULT,
        meta: Mapping[str, Any] | None = None,
    ) -> Turn:
        try:
            turn = next(self._turns)
        except StopIteration:
            raise ChatError(f"the script has {self._said} turns, and one more was asked for") from None
        self._said += 1
        if isinstance(turn, Turn):
            return turn
        pattern, turn = turn
        if not re.search(pattern, last := str(messages[-1].get("content", ""))):
            raise ChatError(
                f"turn {self._said} of the script expects {pattern!r}, and the last message is {last[:500]!r}"
            )
        return turn


def calls(*wanted: tuple[str, Mapping[str, Any]]) -> Turn:
    """A turn that calls tools by name with arguments."""
    made = tuple(ToolCall(f"call-{i}", name, json.dumps(arguments)) for i, (name, arguments) in enumerate(wanted))
    return Turn(tool_calls=made, finish_reason="tool_calls")


TURNS = "turns.jsonl"  # beside solve.sh: the oracle's tool calls one by one, as a policy is to make them


def oracle_calls(solution: Mapping[str, File]) -> list[ToolCall]:
    """The oracle's tool calls: those of turns.jsonl ({"name", "arguments"} per line), or solve.sh as one; then submit.

    Raises ChatError for a line that is none.
    """
    lines = [{"name": "bash", "arguments": {"command": solution["solve.sh"].data.decode()}}]
    if TURNS in solution:
        try:
            lines = [json.loads(line) for line in decode(solution[TURNS].data, TURNS).split("\n") if line.strip()]
            lines = [{"name": str(line["name"]), "arguments": dict(line["arguments"])} for line in lines]
        except (ValueError, KeyError, TypeError) as error:
            raise ChatError(f'{TURNS} wants {{"name": ..., "arguments": {{...}}}} in each line: {error!r}') from error
    wanted = [*lines, {"name": "submit", "arguments": {}}]
    return [ToolCall(f"call-{i}", line["name"], json.dumps(line["arguments"])) for i, line in enumerate(wanted)]


def by_script(script: Mapping[str, File]) -> Scripted:
    """The agent that runs a solution (or a partial one, or an attack) through its tools, and submits.

    A solver's box has no /solution: what solve.sh wants of its neighbours it has to find beside itself ("$0").
    """
    text = script["solve.sh"].data.decode()
    if len(script) == 1:
        return Scripted([calls(("bash", {"command": text})), calls(("submit", {}))])
    written = [("write_file", {"path": f"{_PLACE}/{path}", "content": f.data.decode()}) for path, f in script.items()]
    return Scripted([calls(*written, ("bash", {"command": f"bash {_PLACE}/solve.sh"})), calls(("submit", {}))])
