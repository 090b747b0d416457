"""A simulator of the link: it launches what the plan says, and no earlier than it may."""

import json
import sys

sys.path.insert(0, "/grader")
import grader  # noqa: E402

SLACK = 1.01


def draw(rng, count):
    at, layers = 0.0, []
    for _ in range(count):
        at += rng.choice((1e-5, 3e-4, 1e-3)) * rng.random()
        layers.append({"ready": at, "bytes": int(10 ** rng.uniform(3, 7.3))})
    rate = 10 ** rng.uniform(-10, -9)
    return {"layers": layers, "latency": 10 ** rng.uniform(-4, -2.5), "seconds_per_byte": rate, "largest": 25_000_000}


def filled(problem):
    """Buckets as large as they may be, the usual default."""
    layers, plan, size = problem["layers"], [], 0
    for number, layer in enumerate(layers):
        if not plan or size + layer["bytes"] > problem["largest"]:
            plan.append([])
            size = 0
        plan[-1].append(number)
        size += layer["bytes"]
    return plan


def draw_hard(rng, count):
    """A problem that the usual default does not solve: it does solve every second large one that is drawn."""
    while True:
        problem = draw(rng, count)
        if count == 1 or simulate(problem, filled(problem)) > SLACK * best(problem):
            return problem


def duration(problem, bucket):
    return problem["latency"] + problem["seconds_per_byte"] * sum(problem["layers"][i]["bytes"] for i in bucket)


def simulate(problem, plan):
    """The time at which the last bucket is through. Raises Failed for a plan that is not legal."""
    layers, seen, free = problem["layers"], set(), 0.0
    if not isinstance(plan, list):
        raise grader.Failed("a plan is a list")
    for bucket in plan:
        if not isinstance(bucket, list) or not bucket:
            raise grader.Failed(f"{str(bucket)[:100]} is no bucket")
        for layer in bucket:
            if type(layer) is not int or not 0 <= layer < len(layers) or layer in seen:
                raise grader.Failed(f"{str(layer)[:50]} is no layer, or stands in two buckets")
            seen.add(layer)
        if len(bucket) > 1 and sum(layers[i]["bytes"] for i in bucket) > problem["largest"]:
            raise grader.Failed("a bucket is larger than the largest")
        free = max(free, *(layers[i]["ready"] for i in bucket)) + duration(problem, bucket)
    if len(seen) != len(layers):
        raise grader.Failed(f"{len(layers) - len(seen)} layers are in no bucket")
    return free


def best(problem):
    """Backwards: the least time from `free` on is monotone, so the least end of each prefix is all that matters."""
    layers = problem["layers"]
    total = [0]
    for layer in layers:
        total.append(total[-1] + layer["bytes"])
    least = [0.0] * (len(layers) + 1)
    for end in range(1, len(layers) + 1):
        choices = []
        for start in range(end):
            size = total[end] - total[start]
            if size <= problem["largest"] or end - start == 1:
                begin = max(least[start], layers[end - 1]["ready"])
                choices.append(begin + problem["latency"] + problem["seconds_per_byte"] * size)
        least[end] = min(choices)
    return least[-1]


def verify():
    rng = grader.rng()
    ratios = []
    for count in (1, 40, 150, 300):
        problem = draw_hard(rng, count)
        out = grader.output([grader.PYTHON, "-I", "/app/plan.py"], stdin=json.dumps(problem).encode(), timeout=15.0)
        with grader.deadline():
            got = simulate(problem, grader.parse(out))
        want = best(problem)
        if got > SLACK * want:
            raise grader.Failed(f"{count} layers: through after {got * 1e3:.3f} ms, the best is {want * 1e3:.3f} ms")
        ratios.append(got / want)
    return {"time_over_best": max(ratios)}


grader.main(verify)
