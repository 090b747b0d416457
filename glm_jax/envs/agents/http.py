"""An agent behind any server of OpenAI's chat form."""

from __future__ import annotations

import asyncio
import json
import os
import random
from collections.abc import Mapping, Sequence
from typing import Any

from glm_jax.envs.agents.chat import DEFAULT, ChatError, Message, Sampling, ToolCall, Turn, Usage, text_of

KEY_VARIABLE = "OPENAI_API_KEY"
_AGAIN = {408, 409, 429, 500, 502, 503, 504}
_LONGEST_PAUSE = 60.0  # seconds


class HttpChat:
    """POST {base_url}/chat/completions. The key comes from the environment alone, and stands in no message of ours.

    At most `concurrency` requests are out at once; a refused or lost one is tried `retries` times more, with pauses
    that double and vary. `timeout` is of each try. Use as an async context manager, or call `close`.
    """

    def __init__(
        self,
        base_url: str,
        model: str,
        *,
        key_variable: str = KEY_VARIABLE,
        timeout: float = 300.0,
        retries: int = 5,
        first_pause: float = 1.0,
        concurrency: int = 16,
        transport: Any = None,
    ) -> None:
        try:
            import httpx
        except ImportError as error:
            raise ChatError('an agent behind a server wants httpx: pip install "glm-jax[envs]"') from error
        key = os.environ.get(key_variable)
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._httpx, self._model, self._retries, self._first_pause = httpx, model, retries, first_pause
        self._client = httpx.AsyncClient(
            base_url=base_url.rstrip("/"), headers=headers, timeout=timeout, transport=transport
        )
        self._free = asyncio.Semaphore(concurrency)
        self._key_variable, self._has_key = key_variable, bool(key)

    async def __aenter__(self) -> HttpChat:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        await self._client.aclose()

    async def chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] = (),
        sampling: Sampling = DEFAULT,
        meta: Mapping[str, Any] | None = None,
    ) -> Turn:
        body: dict[str, Any] = {"model": self._model, "messages": list(messages)}
        body |= {"temperature": sampling.temperature, "top_p": sampling.top_p, "max_tokens": sampling.max_tokens}
        optional = {"tools": list(tools), "seed": sampling.seed, "stop": list(sampling.stop)}
        body |= {name: value for name, value in optional.items() if value not in (None, [])}
        async with self._free:
            return _turn(await self._post(body), len(messages))

    async def _post(self, body: dict[str, Any]) -> Any:
        """The answer's JSON, after as many tries as it takes or there are."""
        said = ""
        for attempt in range(self._retries + 1):
            pause = min(_LONGEST_PAUSE, self._first_pause * 2**attempt) * random.uniform(0.5, 1.0)
            try:
                answer = await self._client.post("/chat/completions", json=body)
            except self._httpx.TransportError as error:
                said = f"{type(error).__name__}: {error}"
            else:
                if answer.status_code == 200:
                    try:
                        return answer.json()
                    except ValueError as error:
                        raise ChatError(f"{self._model} answered what is no JSON: {answer.text[:200]!r}") from error
                said = f"status {answer.status_code}: {answer.text[:500]}"
                if answer.status_code not in _AGAIN:
                    hint = "" if self._has_key else f" (no key: {self._key_variable} is not set)"
                    raise ChatError(f"{self._model} at {self._client.base_url} refused{hint}: {said}")
                if (wait := answer.headers.get("retry-after", "")).isdigit():
                    pause = min(_LONGEST_PAUSE, float(wait))
            if attempt < self._retries:
                await asyncio.sleep(pause)
        raise ChatError(f"{self._model} at {self._client.base_url} gave no answer in {self._retries + 1} tries: {said}")


def _turn(data: Any, asked: int) -> Turn:
    """The turn in a server's answer to a conversation of `asked` messages.

    Servers differ from OpenAI's: ids and names may be missing or null, arguments an object, texts lists of parts.
    """
    try:
        choice = data["choices"][0]
        message = choice["message"]
        wanted = [call.get("function") or call for call in message.get("tool_calls") or ()]
        names = [call.get("id") or "" for call in message.get("tool_calls") or ()]
        usage = data.get("usage") or {}
        return Turn(
            text=text_of(message.get("content")),
            tool_calls=tuple(
                ToolCall(
                    id=name if name and names.count(name) == 1 else f"call-{asked}-{number}",
                    name=call.get("name") or "",
                    arguments=_arguments(call.get("arguments")),
                )
                for number, (name, call) in enumerate(zip(names, wanted, strict=True))
            ),
            reasoning=text_of(message.get("reasoning_content") or message.get("reasoning")),
            finish_reason=choice.get("finish_reason") or "stop",
            usage=Usage(usage.get("prompt_tokens") or 0, usage.get("completion_tokens") or 0),
        )
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise ChatError(f"the answer is not of the chat form ({error!r}): {str(data)[:300]}") from error


def _arguments(value: Any) -> str:
    """As JSON, whether the server wrote that or the value itself."""
    return value if isinstance(value, str) else json.dumps({} if value is None else value)
