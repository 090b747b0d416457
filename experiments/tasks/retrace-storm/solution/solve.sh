cat > /app/plan.py <<'PY'
"""Splits the sorted samples into stretches of one width each, by dynamic programming over where they end."""

import json
import sys
from functools import cache

problem = json.load(sys.stdin)
lengths, tokens = problem["lengths"], problem["tokens"]
order = sorted(range(len(lengths)), key=lengths.__getitem__)


def cells(start, end):
    width = lengths[order[end - 1]]
    height = tokens // width
    return -(-(end - start) // height) * height * width


@cache
def best(end, shapes):
    """(cells, where the last stretch starts) of the first `end` samples in at most `shapes` widths."""
    if shapes == 1:
        return cells(0, end), 0
    choices = [(cells(0, end), 0)]
    choices += [(best(start, shapes - 1)[0] + cells(start, end), start) for start in range(1, end)]
    return min(choices)


sys.setrecursionlimit(10000)
batches, end, shapes = [], len(order), problem["shapes"]
while end:
    start = best(end, shapes)[1]
    width = lengths[order[end - 1]]
    height = tokens // width
    batches += [{"width": width, "rows": order[at : min(at + height, end)]} for at in range(start, end, height)]
    end, shapes = start, shapes - 1
json.dump(batches, sys.stdout)
PY
