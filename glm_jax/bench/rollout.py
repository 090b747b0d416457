"""`glm-jax bench rollout`: the sampler as an engine. A crowd, ragged lengths, prefixes, drafts, a long prompt."""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import jax
import numpy as np

from glm_jax.bench.duel import Contender, duel, has_modules, medians, peak_mib
from glm_jax.bench.shape import CROWDS, MODEL, rate
from glm_jax.host.engine import Engine
from glm_jax.host.figures import Compilations
from glm_jax.io.hf import save
from glm_jax.model import weights
from glm_jax.model.config import ModelConfig
from glm_jax.model.hf_config import from_hf
from glm_jax.rollout.config import RolloutConfig

OURS, PEER = "glm_jax", "transformers"


@dataclasses.dataclass(frozen=True)
class Sizes:
    """How much work the parts are; all on the 1.28 M-parameter model of bench.shape, with random weights."""

    slots: int = 32
    requests: int = 128
    lengths: tuple[int, int] = (16, 1024)  # new tokens of ragged requests, log-uniform
    prompt: int = 512  # of which a share is common to all
    long: int = 32768  # a prompt that arrives while the other slots decode
    running: int = 63
    steps: tuple[int, ...] = (1, 0)  # pieces of it between two tokens of the others; 0 = all
    drafts: tuple[int, ...] = (3, 5)
    rounds: int = 1000


FULL = Sizes()
SMOKE = Sizes(slots=4, requests=8, lengths=(2, 16), prompt=32, long=256, running=3, steps=(1,), drafts=(3,), rounds=20)


def run(repeats: int, peer_python: str | None, report: Path | None, smoke: bool) -> str:
    """The tables as text; with `report` every figure as JSON. Without transformers ours stands alone and says so."""
    sizes, peer = SMOKE if smoke else FULL, peer_python or sys.executable
    config = from_hf(MODEL)
    params = weights.init(config, jax.random.key(0))
    has_peer = has_modules(peer, "torch", "transformers")
    found = {
        "steady": steady(config, params, sizes),  # first, while the process has held little else
        "crowd": crowd(config, params, repeats, peer if has_peer else None, "crowd_smoke" if smoke else "crowd"),
        "ragged": ragged(config, params, sizes, repeats),
        "prefixes": prefixes(config, params, sizes, repeats),
        "drafts": drafts(sizes, repeats),
        "gap": gap(config, params, sizes),
    }
    if report is not None:
        about = {"machine": platform.machine(), "cores": os.cpu_count(), "repeats": repeats}
        report.write_text(json.dumps({**about, "sizes": dataclasses.asdict(sizes), **found}, indent=1) + "\n")
    lines = table(found, sizes)
    return "\n".join(lines if has_peer else [*lines, "", f"transformers is not installed for {peer}: --peer_python."])


def crowd(config: ModelConfig, params, repeats: int, peer: str | None, size: str) -> dict[str, float]:
    """Tokens per CPU second of 64 prompts of 24 tokens that get 64 new ones each, on one thread."""
    with tempfile.TemporaryDirectory() as folder:
        save(folder, config, params)
        contenders = [Contender(OURS, sys.executable, "glm_jax.bench.model_ours", [folder, size])]
        if peer:
            script = str(Path(__file__).with_name("model_transformers.py"))
            contenders.append(Contender(PEER, peer, script, [folder, size, "default"]))
        middle = medians(duel(contenders, repeats), None, size)
    return {name: rate(figures, CROWDS[size]) for name, figures in middle.items()}


def ragged(config: ModelConfig, params, sizes: Sizes, repeats: int) -> dict[str, dict[str, float]]:
    """Requests of very different lengths: a freed slot takes the next one, or all slots wait for the longest."""
    low, high = sizes.lengths
    rng = np.random.default_rng(0)
    news = np.exp(rng.uniform(np.log(low), np.log(high), sizes.requests)).astype(int).tolist()
    prompts = [_tokens(rng, config, 16) for _ in news]
    server = _engine(params, config, sizes, 16 + high, queue=sizes.requests)

    def together(_: int) -> None:
        for prompt, new in zip(prompts, news, strict=True):
            server.submit(prompt, new)
        _finish(server)

    def batch_wise(_: int) -> None:
        for start in range(0, sizes.requests, sizes.slots):
            for prompt, new in list(zip(prompts, news, strict=True))[start : start + sizes.slots]:
                server.submit(prompt, new)
            _finish(server)

    found = _race({"refilled": together, "batch by batch": batch_wise}, repeats)
    return {
        name: {"tokens_per_second": sum(news) / median(seconds), "seconds": median(seconds)}
        for name, seconds in found.items()
    }


def prefixes(config: ModelConfig, params, sizes: Sizes, repeats: int) -> dict[str, dict[str, float]]:
    """Prompts of which a share is the same; the first request of a repeat comes alone, as a conversation would."""
    rng = np.random.default_rng(0)
    server = _engine(params, config, sizes, sizes.prompt + 16, queue=sizes.requests, pages=2)
    hits: dict[str, float] = {}

    def ask(share: int) -> Callable[[int], None]:
        def go(_: int) -> None:
            common = _tokens(rng, config, sizes.prompt * share // 100)
            before = dict(server.usage)
            for n in range(sizes.requests):
                server.submit(common + _tokens(rng, config, sizes.prompt - len(common)), 16)
                if n == 0:
                    _finish(server)
            _finish(server)
            run, reused = (server.usage[name] - before.get(name, 0) for name in ("prefilled", "reused"))
            hits[str(share)] = reused / (run + reused)

        return go

    found = _race({str(share): ask(share) for share in (0, 50, 90)}, repeats)
    asked = sizes.requests * (sizes.prompt + 16)
    return {
        share: {"tokens_per_second": asked / median(seconds), "hit_rate": hits[share]}
        for share, seconds in found.items()
    }


def drafts(sizes: Sizes, repeats: int) -> dict[str, dict[str, float]]:
    """What drafts cost where hardly one is right: the layer's weights are random. `bench drafts` has trained ones."""
    config = dataclasses.replace(from_hf(MODEL), num_nextn_predict_layers=1, index_share_for_mtp_iteration=True)
    params = weights.init(config, jax.random.key(0))
    rng = np.random.default_rng(0)
    new = sizes.lengths[1] // 8
    server = _engine(params, config, sizes, 24 + new, queue=sizes.slots, drafts=sizes.drafts)

    def ask(depth: int) -> Callable[[int], None]:
        def go(_: int) -> None:
            for _ in range(sizes.slots):
                server.submit(_tokens(rng, config, 24), new, temperature=1.0)
            _finish(server, depth)

        return go

    found = _race({str(depth): ask(depth) for depth in (0, *sizes.drafts)}, repeats)
    return {depth: {"tokens_per_second": sizes.slots * new / median(s)} for depth, s in found.items()}


def gap(config: ModelConfig, params, sizes: Sizes) -> dict[str, dict[str, float]]:
    """Milliseconds between tokens of the slots that decode: before a long prompt comes, while it is run, after."""
    rng, chunk, page = np.random.default_rng(0), min(64, sizes.long // 4), 16
    new = sizes.long // chunk + 64  # the others go on for longer than the prompt takes
    found = {}
    for steps in sizes.steps:
        pages = sizes.running * -(-(24 + new) // page) + -(-(sizes.long + 64) // page) + sizes.running
        server = Engine(
            params,
            config,
            RolloutConfig(
                slots=sizes.running + 1,
                window=sizes.long + 64,
                ticks=1,
                queue=sizes.running + 1,
                requests=sizes.running + 1,
                prefill_slots=1,
                prefill_chunk=chunk,
                prefill_steps=steps,
                page=page,
                pages=pages,
            ),
        )
        for _ in range(sizes.running):
            server.submit(_tokens(rng, config, 24), new)
        while len(server.round()) < sizes.running:
            pass
        before = [_timed(server.round)[0] for _ in range(16)]
        long, during, sampled = server.submit(_tokens(rng, config, sizes.long), 64), [], []
        while long not in sampled:
            seconds, parts = _timed(server.round)
            sampled = [part.rollout for part in parts]
            during.append(seconds)
        after = [_timed(server.round)[0] for _ in range(16)]
        spans = {"before": median(before), "during, longest": max(during), "after": median(after)}
        found[f"prefill_steps={steps}"] = {name: 1e3 * seconds for name, seconds in spans.items()}
    return found


def steady(config: ModelConfig, params, sizes: Sizes) -> dict[str, float]:
    """Many rounds of requests that come and go: what is compiled after the first ones, and what the process holds."""
    rng = np.random.default_rng(0)
    server = _engine(params, config, sizes, 64, queue=sizes.slots, ticks=8)
    compilations, held = Compilations(), []
    for n in range(sizes.rounds):
        while server.pending < 2 * sizes.slots:
            server.submit(_tokens(rng, config, int(rng.integers(1, 40))), int(rng.integers(1, 24)))
        server.round()
        if n + 1 in (sizes.rounds // 10, sizes.rounds):
            held.append((peak_mib(), compilations.count))
    compilations.close()
    (early, compiled), (late, all_compiled) = held
    return {
        "rounds": sizes.rounds,
        "compiled later": all_compiled - compiled,
        "peak MiB, a tenth": early,
        "peak MiB, all": late,
    }


def _engine(
    params, config, sizes: Sizes, window: int, queue: int, ticks: int = 32, pages: int = 1, drafts=()
) -> Engine:
    """`pages`: as many as so many times all slots at their longest."""
    page = 16
    shape = RolloutConfig(
        slots=sizes.slots,
        window=window,
        ticks=ticks,
        queue=queue,
        requests=queue,
        prefill_slots=min(8, sizes.slots),
        prefill_chunk=32,
        page=page,
        pages=pages * sizes.slots * -(-window // page),
        drafts=drafts,
    )
    return Engine(params, config, shape)


def _finish(server: Engine, depth: int = 0) -> None:
    while server.busy:
        server.round(depth)


def _race(ways: dict[str, Callable[[int], None]], repeats: int) -> dict[str, list[float]]:
    """Seconds of each way, in turns, after one turn that is not counted."""
    found: dict[str, list[float]] = {name: [] for name in ways}
    for n in range(repeats + 1):
        for name, go in ways.items():
            seconds, _ = _timed(lambda go=go, n=n: go(n))
            if n:
                found[name].append(seconds)
    return found


def _timed(call: Callable):
    start = time.perf_counter()
    result = call()
    return time.perf_counter() - start, result


def _tokens(rng, config: ModelConfig, count: int) -> list[int]:
    return rng.integers(3, config.vocab_size, count).tolist()


def table(found: dict[str, dict], sizes: Sizes) -> list[str]:
    """The figures as a person reads them."""
    lines = ["Tokens per CPU second on one thread, 64 prompts of 24 tokens with 64 new ones each:"]
    lines += [f"- {name}: {figure:,.0f}" for name, figure in found["crowd"].items()]
    if PEER in found["crowd"]:
        ours, theirs = found["crowd"][OURS], found["crowd"][PEER]
        lines[-1] += f" (glm_jax is {ours / theirs:.1f} times as fast)"
    low, high = sizes.lengths
    titles = {
        "ragged": f"{sizes.requests} requests of {low} to {high} new tokens, {sizes.slots} slots",
        "prefixes": f"{sizes.requests} prompts of {sizes.prompt} tokens, 16 new ones each; per cent in common",
        "drafts": "drafts of a layer with random weights, which are hardly ever right: what they cost",
        "gap": f"milliseconds between tokens of {sizes.running} slots, around a prompt of {sizes.long:,} tokens",
    }
    for part, title in titles.items():
        rows = found[part]
        names = list(next(iter(rows.values())))
        lines += ["", title + ":", "", f"| | {' | '.join(name.replace('_', ' ') for name in names)} |"]
        lines.append("|---" * (len(names) + 1) + "|")
        for row, figures in rows.items():
            cells = (f"{v:.2f}" if v < 100 else f"{v:,.0f}" for v in figures.values())
            lines.append(f"| {row} | {' | '.join(cells)} |")
    steady = found["steady"]
    lines += [
        "",
        f"{steady['rounds']} rounds of requests that come and go, after the first tenth: "
        f"{steady['compiled later']} compilations, peak memory {steady['peak MiB, a tenth']:,.0f} MiB, at the end "
        f"{steady['peak MiB, all']:,.0f} MiB.",
    ]
    return lines
