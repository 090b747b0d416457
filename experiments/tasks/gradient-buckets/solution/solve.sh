cat > /app/plan.py <<'PY'
"""The earliest end of the first n layers, for each n: the last bucket starts when its layers and the link are there."""

import json
import sys

problem = json.load(sys.stdin)
layers, latency, rate = problem["layers"], problem["latency"], problem["seconds_per_byte"]
ends, starts = [0.0], [0]
for last in range(len(layers)):
    size, best = 0, None
    for first in range(last, -1, -1):
        size += layers[first]["bytes"]
        if size > problem["largest"] and first < last:
            break
        end = max(ends[first], layers[last]["ready"]) + latency + rate * size
        if best is None or end < best[0]:
            best = (end, first)
    ends.append(best[0])
    starts.append(best[1])
buckets, at = [], len(layers)
while at:
    buckets.append(list(range(starts[at], at)))
    at = starts[at]
json.dump(buckets[::-1], sys.stdout)
PY
