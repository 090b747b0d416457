"""As the loader does now: samples as they come, padded to the longest of each batch."""

import json
import sys

problem = json.load(sys.stdin)
lengths, batches, rows = problem["lengths"], [], []
for sample in range(len(lengths)):
    width = max(lengths[row] for row in [*rows, sample])
    if (len(rows) + 1) * width > problem["tokens"]:
        batches.append({"width": max(lengths[row] for row in rows), "rows": rows})
        rows = []
    rows.append(sample)
batches.append({"width": max(lengths[row] for row in rows), "rows": rows})
json.dump(batches, sys.stdout)
