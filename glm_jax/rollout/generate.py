"""`generate`: complete a list of prompts with a model, through the same slots that training samples with."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np

from glm_jax.model.config import ModelConfig
from glm_jax.model.weights import Transformer, for_decoding
from glm_jax.rollout import admission, sampler, slots
from glm_jax.rollout.config import RolloutConfig
from glm_jax.rollout.log import Sampled, read_log
from glm_jax.rollout.pace import Pace
from glm_jax.rollout.requests import STOP_IDS, Requests, empty_requests
from glm_jax.rollout.strings import StopStrings

PREFILL_CHUNK = 256  # prompt tokens of a slot that run through the model at once
STRING_TICKS = 32  # of a round where stop strings are looked for: so many tokens at most are sampled in vain
TRIAL_TICKS = 16  # of a round that shows about how fast a depth is: fewer than slots.HELD, so that no state is lost
_compiled: set[tuple[ModelConfig, RolloutConfig]] = set()  # calls of these sizes take no time to compile


@dataclasses.dataclass(frozen=True)
class Completion:
    """What was sampled for one prompt; a stop id or string that ended it is at its end."""

    tokens: list[int]
    logp: list[float]  # under the distribution sampled from; 0 at temperature 0
    passes: int = 0  # that verified all drafts and did not end the completion
    passed: int = 0  # tokens that they sampled


def generate(
    params: Transformer,
    config: ModelConfig,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    temperature: float = 0.0,
    top_p: float = 1.0,
    stop: Sequence[int] = (),
    seed: int = 0,
    slots_at_once: int = 32,
    drafts: int = 0,
    pace: Pace | None = None,
    stop_strings: Sequence[str] = (),
    decode: Callable[[Iterable[int]], str] | None = None,
) -> list[Completion]:
    """Completes each prompt with up to `max_new_tokens`; greedy at temperature 0.

    Prompts of any lengths share the slots: a slot that ends takes the next prompt. Completion i depends on prompt i,
    the seed and i alone, not on the other prompts.

    With `drafts` the model's draft layer proposes so many tokens at a time while that is faster: greedy completions
    stay as they are, sampled ones keep their distribution but are other draws, and hang on how fast the machine is.
    `pace` decides that; by default it is the one of all calls of about this size.

    A completion ends at the token that completes one of `stop_strings`; `decode` says what tokens mean.

    Raises:
        ValueError: for an empty prompt, a token outside the vocabulary, more than 8 stop ids, an empty stop string or
            some without `decode`, a temperature or top_p that is no such thing, or drafts of a model without a draft
            layer.
    """
    _check(prompts, config, max_new_tokens, stop)
    if stop_strings and decode is None:
        raise ValueError(f"stop_strings={stop_strings} are looked for in text: give decode, such as tokenizer.decode")
    strings = StopStrings(tuple(stop_strings), decode) if stop_strings else None
    depths = (drafts,) if drafts else ()
    if problems := RolloutConfig(temperature=temperature, top_p=top_p, drafts=depths).check():
        raise ValueError("; ".join(problems))
    if not prompts:
        return []
    longest = max(len(p) for p in prompts)
    # Rounded, so that calls of about one size share a compiled program.
    window = longest + max_new_tokens
    window = _round_up(window, 1 << max(5, window.bit_length() - 4))
    count = min(slots_at_once, len(prompts))
    sizes = RolloutConfig(
        slots=count,
        window=window,
        ticks=_round_up(max_new_tokens, 256),  # at most: the loop ends with the last prompt
        queue=len(prompts),
        requests=len(prompts),
        prefill_slots=min(8, count),
        prefill_chunk=min(PREFILL_CHUNK, _round_up(longest, 32)),
        drafts=depths,
    )
    pace = pace or _pace(config, sizes)
    guessing = not pace.knows
    depth = None if guessing else pace.next()
    if depth == 0:
        sizes = dataclasses.replace(sizes, drafts=())  # so that nothing is kept for drafts that are not made
    first, begun = (config, sizes) not in _compiled, time.perf_counter()
    requests = _requests(prompts, window, max_new_tokens, temperature, top_p, stop)
    view, state = _start(params, config, sizes, requests)
    made = [Completion([], []) for _ in prompts]
    ended = np.full(len(prompts), -1, np.int32)  # by a string: their slots go to others in the next round
    left = True

    def go(depth: int, ticks: int) -> tuple[int, float]:
        """A round; gives how many tokens it sampled, and how long it took."""
        nonlocal state, left
        start = time.perf_counter()
        state, *out = _run(view, config, sizes, state, ended, *map(np.int32, (seed, depth, ticks)))
        log, left = jax.device_get(out)
        parts = read_log(log, depth)
        seconds = time.perf_counter() - start
        for part in parts:
            if ended[part.rollout] < 0:
                before = made[part.rollout]
                count = strings.end(before.tokens, part.tokens) if strings else None
                made[part.rollout] = _longer(before, part, count)
                ended[part.rollout] = -1 if count is None else part.rollout
        return sum(len(part.tokens) for part in parts), seconds

    while left:
        if pace.knows:
            go(pace.best if depth is None else depth, STRING_TICKS if strings else sizes.ticks)
            continue
        unknown = pace.next()
        go(unknown, 1)  # compiles, and runs prompts
        _, call = go(unknown, 0)
        tokens, seconds = go(unknown, TRIAL_TICKS)
        pace.guess(unknown, tokens, seconds - call)
    # A guess knows nothing of the prompts that take freed slots: calls that ran at one depth tell what that is worth.
    if depth is not None and not first:
        pace.add(depth, sum(len(each.tokens) for each in made), time.perf_counter() - begun)
    _compiled.add((config, sizes))
    return made


def joined(parts: Sequence[Sampled]) -> Completion:
    """What rounds sampled for one prompt, in their order."""
    done = Completion([], [])
    for part in parts:
        done = _longer(done, part)
    return done


def _longer(done: Completion, part: Sampled, count: int | None = None) -> Completion:
    """With what a round sampled, or with `count` tokens of it, which end the completion."""
    passes, passed = (part.passes, part.passed) if count is None else (0, 0)
    return Completion(
        tokens=done.tokens + part.tokens[:count],
        logp=done.logp + part.logp[:count],
        passes=done.passes + passes,
        passed=done.passed + passed,
    )


@cache
def _pace(config: ModelConfig, sizes: RolloutConfig) -> Pace:
    return Pace(sizes.drafts)


@partial(jax.jit, static_argnums=(1, 2))
def _start(params, config, sizes, requests):
    return for_decoding(params, config), admission.send(slots.init(config, sizes), requests)


@partial(jax.jit, static_argnums=(1, 2), donate_argnums=3)
def _run(view, config, sizes, state, cancel, seed, depth, ticks):
    state = admission.cancel(state, cancel)
    state, log, _ = sampler.run(view, config, sizes, state, jnp.int32(0), seed, depth, ticks)
    return state, log, jnp.any(state.slots.live) | jnp.any(state.queue.requests.count > 0)


def _requests(prompts, window, max_new_tokens, temperature, top_p, stop) -> Requests:
    requests = empty_requests(len(prompts), window)
    for i, prompt in enumerate(prompts):
        requests.tokens[i, : len(prompt)] = prompt
        requests.length[i], requests.limit[i] = len(prompt), len(prompt) + max_new_tokens
        requests.rollout[i] = i
    requests.stop[:, : len(stop)] = list(stop)
    requests.temperature[:], requests.top_p[:] = temperature, top_p
    return requests.replace(count=np.int32(len(prompts)))


def _check(prompts, config: ModelConfig, max_new_tokens: int, stop) -> None:
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens={max_new_tokens} must be at least 1")
    if len(stop) > STOP_IDS:
        raise ValueError(f"{len(stop)} stop ids given, at most {STOP_IDS} are looked at")
    for i, prompt in enumerate(prompts):
        if not len(prompt):
            raise ValueError(f"prompt {i} is empty: a model needs at least one token to go on from")
        if outside := [t for t in prompt if not 0 <= t < config.vocab_size]:
            raise ValueError(f"prompt {i} holds tokens {outside[:4]} outside the vocabulary of {config.vocab_size}")


def _round_up(n: int, to: int) -> int:
    return -(-n // to) * to
