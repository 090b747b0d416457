"""What a rollout may use over its whole life, however often it is sent to the device."""

from __future__ import annotations

from dataclasses import dataclass

from glm_jax.rollout import strings


@dataclass(frozen=True)
class LimitConfig:
    """Ends of a rollout besides stop ids, the window, tools.turns and wall_time."""

    tokens: int | None = None  # that it may sample, observations apart; None = what the window leaves
    strings: tuple[str, ...] = ()  # in what it samples, within a turn; each ends it at the token that completes it

    def check(self) -> list[str]:
        problems = strings.check(self.strings)
        if self.tokens is not None and self.tokens < 1:
            problems.append(f"tokens is {self.tokens}; it must be at least 1, or None")
        return problems
