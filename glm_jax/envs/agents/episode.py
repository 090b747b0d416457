"""One agent on one task: turns until it submits or a limit ends it, then the verdict on what it left."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from glm_jax.envs.agents.chat import DEFAULT, ChatClient, Sampling, Turn
from glm_jax.envs.agents.tools import SCHEMAS, Observation, Tools
from glm_jax.envs.sandbox.box import Box
from glm_jax.envs.tasks.task import Task
from glm_jax.envs.verify.attempt import agent_box, finish
from glm_jax.envs.verify.grade import Verdict, grade, grade_in_place

SYSTEM = (
    "You work in a Linux box without network, through tools. Do what the task says, look at what you did, and call "
    "submit when it is done: only what is in the box then counts."
)


@dataclass(frozen=True)
class EpisodeLimits:
    """Bounds of one episode. Each has an ending of its own."""

    turns: int = 40
    tokens: int = 200_000  # of the agent's turns
    seconds: float = 900.0
    command_seconds: float = 120.0


BOUNDS = EpisodeLimits()


@dataclass
class Episode:
    """What was said and seen, how it ended, and what the verifier gave.

    `ending`: submitted; answered (a turn without a tool call); or the limit that ended it: turns, tokens, wall_time.
    """

    messages: list[dict[str, Any]]
    turns: list[Turn] = field(default_factory=list)
    ending: str = ""
    verdict: Verdict = Verdict(None, "not graded yet")


async def run(
    task: Task,
    agent: ChatClient,
    limits: EpisodeLimits = BOUNDS,
    sampling: Sampling = DEFAULT,
    hear: Callable[[dict[str, Any]], None] = lambda message: None,
) -> Episode:
    """Runs an episode to its end and grades it. `hear` gets each message as it is made.

    Raises ChatError where the agent gives no answer, BoxDied where the box ended by itself.
    """
    box = await asyncio.to_thread(agent_box, task)
    try:
        episode = Episode([])

        def say(message: dict[str, Any]) -> None:
            episode.messages.append(message)
            hear(message)

        say({"role": "system", "content": SYSTEM})
        say({"role": "user", "content": task.instruction})
        tools = Tools(box, task.workdir, task.env, limits.command_seconds)
        episode.ending = await _converse(episode, agent, tools, limits, sampling, say)
        episode.verdict = await asyncio.to_thread(_judge, task, box)
        return episode
    finally:
        await asyncio.to_thread(box.close)


async def _converse(
    episode: Episode,
    agent: ChatClient,
    tools: Tools,
    limits: EpisodeLimits,
    sampling: Sampling,
    say: Callable[[dict[str, Any]], None],
) -> str:
    """Turns and observations until something ends them; returns what."""
    deadline, spent = time.monotonic() + limits.seconds, 0
    for _ in range(limits.turns):
        try:
            async with asyncio.timeout(max(0.0, deadline - time.monotonic())):
                turn = await agent.chat(episode.messages, SCHEMAS, sampling)
        except TimeoutError:
            return "wall_time"
        episode.turns.append(turn)
        say(turn.message())
        spent += turn.usage.completion
        if not turn.tool_calls:
            return "answered"
        for call in turn.tool_calls:
            if (remaining := deadline - time.monotonic()) <= 0:
                return "wall_time"
            seen: Observation = await asyncio.to_thread(tools.call, call, remaining)
            say({"role": "tool", "tool_call_id": call.id, "content": seen.text})
            if seen.submitted:
                return "submitted"
        if spent >= limits.tokens:
            return "tokens"
    return "turns"


def _judge(task: Task, box: Box) -> Verdict:
    return grade(task, finish(task, box)) if task.separate else grade_in_place(task, box)
