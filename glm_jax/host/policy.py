"""Our model as an agent: a chat client that is handed tokens and gives tokens, as in training."""

from __future__ import annotations

import asyncio
import json
import random
import threading
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from glm_jax.data.file_tokenizer import FileTokenizer, TokenizerError
from glm_jax.data.tokenizer import Tokenizer, tokenizer_of
from glm_jax.envs.agents.chat import DEFAULT, ChatError, Message, Sampling, ToolCall, Turn, Usage, text_of
from glm_jax.host import calls
from glm_jax.host.engine import Engine
from glm_jax.io import hf
from glm_jax.model.config import ModelConfig
from glm_jax.model.weights import Transformer
from glm_jax.rollout.config import RolloutConfig
from glm_jax.rollout.generate import Completion, joined

NO_CALL = "malformed"  # the name of a call that is none
PAGE, KEPT = 16, 4  # columns of a page; conversations of full length that pages are kept of


class Policy:
    """Answers conversations with turns of a model, which keep their ids and log-probs.

    A conversation is laid out as a run lays out its rollouts: the chat template where the tokenizer has one, else the
    user's text alone; then turns and observations as in host.calls. Turns that this object made come back as the ids
    that were sampled, so no text is encoded twice. One call per turn, as `</tool_call>` ends it.

    observation: most tokens of a result; turn: most tokens of a turn, if the caller asks for more.
    """

    def __init__(
        self, params: Transformer, config: ModelConfig, tokenizer: Tokenizer, observation: int = 256, turn: int = 512
    ) -> None:
        calls.check(tokenizer)
        self._params, self._config, self._tokenizer = params, config, tokenizer
        self._observation, self._turn = observation, turn
        self._engine: Engine | None = None
        self._lock = threading.Lock()
        self._made: dict[str, list[int]] = {}  # sampled ids by the call's id, or by the text of a turn without one

    @classmethod
    def load(cls, folder: Path, observation: int = 256) -> Policy:
        """Of a model folder, and the tokenizer beside it (or bytes)."""
        config, params = hf.load(folder)
        return cls(params, config, tokenizer_of(folder), observation)

    async def chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] = (),
        sampling: Sampling = DEFAULT,
        meta: Mapping[str, Any] | None = None,
    ) -> Turn:
        """The next turn, sampled from the whole conversation. Raises ChatError where its start cannot be laid out."""
        prompt = self._ids(messages, tools)
        close, stops = self._tokenizer.tags[calls.CLOSE], self._tokenizer.stop_ids
        made = await asyncio.to_thread(
            self._complete,
            prompt,
            min(sampling.max_tokens, self._turn),
            sampling.temperature,
            sampling.top_p,
            (close, *stops),
            random.getrandbits(31) if sampling.seed is None else sampling.seed,
        )
        ids, last = made.tokens, made.tokens[-1]
        wanted = (self._call(ids),) if last == close else ()
        text = self._tokenizer.decode(_before_call(ids, self._tokenizer))
        self._made[wanted[0].id if wanted else text] = ids
        return Turn(
            text=text,
            tool_calls=wanted,
            finish_reason="tool_calls" if wanted else "stop" if last in stops else "length",
            usage=Usage(len(prompt), len(ids)),
            prompt_ids=tuple(prompt),
            output_ids=tuple(ids),
            logprobs=tuple(made.logp),
        )

    def _complete(
        self, prompt: Sequence[int], new: int, temperature: float, top_p: float, stop: Sequence[int], seed: int
    ) -> Completion:
        """One turn at a time, by an engine that keeps what earlier turns computed; a larger one for longer turns."""
        with self._lock:
            longest = len(prompt) + new
            if self._engine is None or self._engine.sizes.window < longest:
                self._engine = Engine(self._params, self._config, _sizes(1 << max(9, longest.bit_length())))
            engine = self._engine
            engine.seed = seed
            engine.submit(prompt, new, temperature, top_p, stop, number=0)  # the number is part of what is drawn
            parts = []
            while engine.busy:
                parts += engine.round()
            return joined(parts)

    def _call(self, ids: Sequence[int]) -> ToolCall:
        name = f"call-{uuid.uuid4().hex[:12]}"
        try:
            call = calls.parse(ids, self._tokenizer)
        except calls.Malformed as error:
            return ToolCall(name, NO_CALL, "{}", str(error))
        return ToolCall(name, call.name, call.arguments)

    def _ids(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> list[int]:
        first = next((i for i, message in enumerate(messages) if message["role"] == "user"), None)
        if first is None:
            raise ChatError("the conversation has no message of a user, which a policy answers")
        ids = self._start(messages[: first + 1], tools)
        for message in messages[first + 1 :]:
            if message["role"] == "tool":
                ids += calls.response(text_of(message["content"]), self._tokenizer, self._observation)
            elif message["role"] == "assistant":
                ids += self._said(message)
            else:
                raise ChatError(f"a message of {message['role']!r} follows the task; turns and results do")
        return ids

    def _start(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> list[int]:
        if not isinstance(self._tokenizer, FileTokenizer):
            return self._tokenizer.encode(text_of(messages[-1]["content"]))
        try:
            return self._tokenizer.encode(self._tokenizer.chat(messages, tools=list(tools)))
        except TokenizerError as error:
            raise ChatError(str(error)) from error

    def _said(self, message: Message) -> list[int]:
        """The ids of a turn: those that were sampled, or as they would be written where another agent made it."""
        wanted = message.get("tool_calls", ())
        text = text_of(message["content"])
        if (own := self._made.get(wanted[0]["id"] if wanted else text)) is not None:
            return own
        ids = self._tokenizer.plain(text)
        for call in wanted:
            ids += calls.write(call["function"]["name"], json.loads(call["function"]["arguments"]), self._tokenizer)
        return ids


def _sizes(window: int) -> RolloutConfig:
    """One slot, and pages for four conversations."""
    pages = KEPT * -(-window // PAGE)
    return RolloutConfig(
        slots=1,
        window=window,
        ticks=window,
        queue=1,
        requests=1,
        prefill_slots=1,
        prefill_chunk=64,
        page=PAGE,
        pages=pages,
    )


def _before_call(ids: Sequence[int], tokenizer: Tokenizer) -> Sequence[int]:
    """What a turn says before its call."""
    opening = tokenizer.tags[calls.OPEN]
    return ids[: len(ids) - 1 - list(reversed(ids)).index(opening)] if opening in ids else ids
