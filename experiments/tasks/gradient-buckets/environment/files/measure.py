"""The time of a plan on public examples."""

import json
import random
import subprocess
import sys

for seed in range(3):
    rng, at, layers = random.Random(seed), 0.0, []
    for _ in range(80):
        at += rng.uniform(1e-4, 6e-4)
        layers.append({"ready": at, "bytes": int(10 ** rng.uniform(3, 7))})
    problem = {"layers": layers, "latency": 8e-4, "seconds_per_byte": 2e-10, "largest": 25_000_000}
    done = subprocess.run(
        [sys.executable, "/app/plan.py"], input=json.dumps(problem), capture_output=True, text=True, check=True
    )
    free = 0.0
    for bucket in json.loads(done.stdout):
        start = max(free, max(layers[i]["ready"] for i in bucket))
        free = start + 8e-4 + 2e-10 * sum(layers[i]["bytes"] for i in bucket)
    print(f"seed {seed}: through after {free * 1e3:.2f} ms; the backward pass alone takes {at * 1e3:.2f} ms")
