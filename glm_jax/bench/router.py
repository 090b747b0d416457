"""`glm-jax bench router`: idle slots and waits of fleets, simulated, and of the real sampler; batch-wise beside it."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import jax

from glm_jax.bench.fleet import Found, Line, Work, draw, simulate
from glm_jax.bench.shape import MODEL
from glm_jax.host.device import Device, Request
from glm_jax.learn.config import LearnConfig
from glm_jax.model.hf_config import from_hf
from glm_jax.program.exchange import Outbox
from glm_jax.program.round import Program, build
from glm_jax.rollout.config import RolloutConfig
from glm_jax.sharding.mesh import MeshConfig, make_mesh

SUBMISSIONS = {"as slots free": False, "batch-wise": True}
OPEN = 2  # rollouts that are open, per slot
PATIENCE = 120.0  # seconds that a round of the real sampler may take


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What is run: `each` rollouts per slot. The first sizes are of one simulated shard, the others of the real one."""

    shards: tuple[int, ...]
    shard: RolloutConfig
    medians: tuple[int, ...]  # of the lengths, by kind
    each: int
    real: RolloutConfig
    real_medians: tuple[int, ...]
    real_each: int


_REAL = RolloutConfig(slots=16, window=512, ticks=16, queue=16, requests=16, prefill_slots=8, prefill_chunk=8)
FULL = Sizes(
    shards=(8, 64, 512),
    shard=RolloutConfig(slots=16, window=8192, ticks=64, queue=16, requests=16),
    medians=(128, 512),
    each=20,
    real=_REAL,
    real_medians=(16, 64),
    real_each=12,
)
SMOKE = dataclasses.replace(
    FULL,
    shards=(2, 4),
    each=4,
    real=dataclasses.replace(_REAL, slots=4, prefill_slots=4, queue=4, window=64),
    real_each=3,
)


def run(repeats: int, report: Path | None, smoke: bool) -> str:
    """The tables as text; with `report` their figures as JSON. The real sampler's times are medians of `repeats`."""
    sizes = SMOKE if smoke else FULL
    fleets = {shards: of_fleet(sizes, shards) for shards in sizes.shards}
    slots, window = sizes.real.slots, sizes.real.window
    work = draw(sizes.real_each * slots, sizes.real_medians, window - 1, seed=0)
    real, speed = of_sampler(sizes.real, work, repeats)
    if report is not None:
        plain = lambda found: {name: dataclasses.asdict(one) for name, one in found.items()}
        figures = {"simulated": {n: plain(found) for n, found in fleets.items()}, "sampler": plain(real)}
        report.write_text(json.dumps(figures | {"tokens_per_second": speed, "repeats": repeats}, indent=1) + "\n")
    shard, kinds = sizes.shard, " and ".join(map(str, sizes.medians))
    lines = [
        f"Simulated: {shard.slots} slots a shard, queues of {shard.queue}, rounds of {shard.ticks} ticks, lengths "
        f"log-normal (sigma = 1, medians {kinds}), {OPEN} rollouts open per slot, {sizes.each} per slot in all. A wait "
        "begins when a rollout is opened: batch-wise, when the batch before has come back.",
        "",
        f"| shards | submission | {_COLUMNS} |",
        "|---|---|---|---|---|---|---|",
        *(f"| {n} | {name} | {_cells(one)} |" for n, found in fleets.items() for name, one in found.items()),
        "",
        f"The sampler itself: {slots} slots, rounds of {sizes.real.ticks} ticks, medians "
        f"{' and '.join(map(str, sizes.real_medians))}; tokens / s: median of {repeats}, in turns.",
        "",
        f"| submission | {_COLUMNS} | tokens / s |",
        "|---|---|---|---|---|---|---|",
        *(f"| {name} | {_cells(one)} | {speed[name]:,.0f} |" for name, one in real.items()),
    ]
    return "\n".join(lines)


def of_fleet(sizes: Sizes, shards: int) -> dict[str, Found]:
    """The same work by each kind of submission."""
    slots = sizes.shard.slots * shards
    work = draw(sizes.each * slots, sizes.medians, sizes.shard.window, seed=0)
    return {name: simulate(sizes.shard, shards, work, OPEN * slots, batch) for name, batch in SUBMISSIONS.items()}


def of_sampler(sizes: RolloutConfig, work: Work, repeats: int) -> tuple[dict[str, Found], dict[str, float]]:
    """The work through the program's own slots and queue on one device, and the tokens per second of that."""
    program = build(from_hf(MODEL), sizes, LearnConfig(advantage="running_mean"), make_mesh(MeshConfig(data=1)))
    found: dict[str, Found] = {}
    speed: dict[str, list[float]] = {name: [] for name in SUBMISSIONS}
    for repeat in range(repeats + 1):
        for name, batchwise in SUBMISSIONS.items():
            start = time.perf_counter()
            found[name] = sample(program, sizes, work, batchwise)
            if repeat:  # the first ones compile
                speed[name].append(sum(work.lengths) / (time.perf_counter() - start))
    return found, {name: median(times) for name, times in speed.items()}


def sample(program: Program, sizes: RolloutConfig, work: Work, batchwise: bool) -> Found:
    """Greedy tokens of a new model, up to each rollout's length; rounds are sent as a run's loop sends them."""
    outboxes: list[Outbox] = []

    def watched(state: Any, inbox: Any) -> tuple[Any, Outbox]:
        state, outbox = program.sample(state, inbox)
        outboxes.append(outbox)
        return state, outbox

    device = Device(dataclasses.replace(program, round=watched), program.init(0), sizes, (1, 1, 1), PATIENCE)
    line, left = Line(work, OPEN * sizes.slots, batchwise), []
    rounds = 0  # of which a rollout's opening is told in
    while not line.done:
        chosen = line.send(rounds, device.room())
        requests = [
            Request(n, [1], 1 + work.lengths[n], temperature=0.0, top_p=1.0, stop=(), kind=work.kinds[n])
            for n in chosen
        ]
        device.dispatch(requests, (), None)
        left.append(line.left)
        rounds += 1
        if len(device.pending) > 1:
            for part in device.collect().sampled:
                if part.ending:
                    line.open -= 1
                    device.shards.lengths.add(work.kinds[part.rollout], work.lengths[part.rollout])
    while device.pending:
        device.collect()
    return _of_outboxes(jax.device_get(outboxes), left, line)


def _of_outboxes(outboxes: Sequence[Outbox], left: Sequence[int], line: Line) -> Found:
    """What the logs tell, tick by tick; `left`: rollouts that the host had not sent when it sent each round."""
    starts, started, idle, waiting, sampled = [0], {}, 0, 0, 0
    for outbox, unsent in zip(outboxes, left, strict=True):
        owner = outbox.log.rollout[: int(outbox.log.ticks)]
        first = [(tick, n) for tick, row in enumerate(owner.tolist()) for n in row if n >= 0 and n not in started]
        for tick, n in first:
            started.setdefault(n, starts[-1] + tick)
        waits = unsent or outbox.queued.sum()
        until = len(owner) if waits else max((started[n] - starts[-1] for _, n in first), default=0)
        idle += int((owner[:until] < 0).sum())
        waiting += owner[:until].size
        sampled += int((owner >= 0).sum())
        starts.append(starts[-1] + len(owner))
    waits = [started[n] - starts[round] for n, round in enumerate(line.opened)]
    slots = outboxes[0].log.rollout.shape[1]
    return Found.of(idle, waiting, sampled, starts[-1] * slots, waits, starts[-1])


_COLUMNS = "idle while one waits | slots in use, end included | median wait, ticks | p99 | most"


def _cells(found: Found) -> str:
    return (
        f"{found.idle:.1%} | {found.used:.1%} | {found.wait_median:,.0f} | {found.wait_p99:,.0f} | {found.wait_most:,}"
    )
