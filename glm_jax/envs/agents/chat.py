"""What an agent is to an environment: something that answers a conversation with a turn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

Message = Mapping[str, Any]  # of the OpenAI chat form: role, content, tool_calls, tool_call_id


class ChatError(RuntimeError):
    """An agent that cannot answer: a server that refuses, a cassette without the answer, a script that is at odds."""


def text_of(content: Any) -> str:
    """The text of a message's content: a text, None, or a list of parts, of which those without a text are left out.

    Raises TypeError for anything else.
    """
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, Sequence):
        raise TypeError(f"the content of a message is {str(content)[:100]}; it has to be a text or a list of parts")
    parts = [part if isinstance(part, str) else part.get("text") for part in content]
    return "".join(part for part in parts if isinstance(part, str))


@dataclass(frozen=True)
class ToolCall:
    """A call that the agent wants; `arguments` is JSON as the agent wrote it, which may be none."""

    id: str
    name: str
    arguments: str
    problem: str = ""  # why it could not be read, where the agent wrote no call


@dataclass(frozen=True)
class Usage:
    """Tokens of a turn."""

    prompt: int = 0
    completion: int = 0


@dataclass(frozen=True)
class Turn:
    """An agent's answer. The last four are there where the agent is a policy of ours; trainers want them."""

    text: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    reasoning: str = ""
    finish_reason: str = "stop"  # stop | tool_calls | length
    usage: Usage = Usage()
    prompt_ids: tuple[int, ...] | None = None
    output_ids: tuple[int, ...] | None = None
    logprobs: tuple[float, ...] | None = None
    policy_version: int | None = None

    def message(self) -> dict[str, Any]:
        """The turn as a message of the conversation that goes on."""
        message: dict[str, Any] = {"role": "assistant", "content": self.text}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in self.tool_calls
            ]
        return message


@dataclass(frozen=True)
class Sampling:
    """How an agent draws its answer."""

    temperature: float = 1.0
    top_p: float = 1.0
    max_tokens: int = 4096
    seed: int | None = None
    stop: tuple[str, ...] = ()


DEFAULT = Sampling()


class ChatClient(Protocol):
    """Anything that answers a conversation. `meta` (a rollout's number) is for its logs; no answer rests on it."""

    async def chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] = (),
        sampling: Sampling = DEFAULT,
        meta: Mapping[str, Any] | None = None,
    ) -> Turn:
        """The next turn. Raises ChatError where there is none."""
        ...
