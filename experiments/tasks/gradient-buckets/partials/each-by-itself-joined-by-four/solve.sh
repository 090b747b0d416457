# Four at a time, whatever they weigh.
cat > /app/plan.py <<'PY'
import json
import sys

problem = json.load(sys.stdin)
buckets = []
for number, layer in enumerate(problem["layers"]):
    full = not buckets or len(buckets[-1]) == 4
    if full or sum(problem["layers"][i]["bytes"] for i in buckets[-1]) + layer["bytes"] > problem["largest"]:
        buckets.append([])
    buckets[-1].append(number)
json.dump(buckets, sys.stdout)
PY
