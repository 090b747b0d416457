# Buckets of a fixed size, the usual default.
cat > /app/plan.py <<'PY'
import json
import sys

problem = json.load(sys.stdin)
buckets, size = [[]], 0
for number, layer in enumerate(problem["layers"]):
    if buckets[-1] and size + layer["bytes"] > problem["largest"]:
        buckets.append([])
        size = 0
    buckets[-1].append(number)
    size += layer["bytes"]
json.dump(buckets, sys.stdout)
PY
