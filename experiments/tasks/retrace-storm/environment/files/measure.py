"""Counts of a plan on public examples: shapes, cells that are padding."""

import json
import random
import subprocess
import sys

for seed in range(3):
    rng = random.Random(seed)
    lengths = [min(512, 1 + int(rng.expovariate(1 / 70))) for _ in range(300)]
    problem = {"lengths": lengths, "tokens": 4096, "shapes": 3 + seed}
    done = subprocess.run(
        [sys.executable, "/app/plan.py"], input=json.dumps(problem), capture_output=True, text=True, check=True
    )
    batches = json.loads(done.stdout)
    cells = sum(4096 // batch["width"] * batch["width"] for batch in batches)
    widths = {batch["width"] for batch in batches}
    print(f"seed {seed}: {len(widths)} shapes of {problem['shapes']}, padding {cells - sum(lengths)} of {cells} cells")
