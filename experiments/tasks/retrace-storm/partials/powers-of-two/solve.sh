# Rounds up to powers of two: too many shapes where C is small, too much padding where it is not.
cat > /app/plan.py <<'PY'
import json
import sys

problem = json.load(sys.stdin)
groups = {}
for sample, length in enumerate(problem["lengths"]):
    groups.setdefault(1 << (length - 1).bit_length(), []).append(sample)
batches = []
for width, rows in groups.items():
    height = problem["tokens"] // width
    batches += [{"width": width, "rows": rows[i : i + height]} for i in range(0, len(rows), height)]
json.dump(batches, sys.stdout)
PY
