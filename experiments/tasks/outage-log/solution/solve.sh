python3 - <<'PY'
import json
import re
import statistics

lines = []
for line in open("/app/service.log"):
    time, level, service, rest = line.split(None, 3)
    lines.append((time, level, service, rest))
own = [(time, service) for time, level, service, rest in lines if level == "ERROR" and "id=-" not in rest and "upstream" not in rest]
culprit = own[0][1]
first, last = own[0][0], own[-1][0]
tries = {}
for _, level, service, rest in lines:
    if service == "gateway" and level == "ERROR":
        match = re.search(r"id=(\w+).*try=(\d+)", rest)
        tries[match[1]] = max(int(match[2]), tries.get(match[1], 0))
before = [int(re.search(r"ms=(\d+)", rest)[1]) for time, _, service, rest in lines if service == "gateway" and " ok " in rest and time < first]
answer = {
    "service": culprit,
    "first": first,
    "last": last,
    "requests": len(tries),
    "retried": sum(count > 1 for count in tries.values()),
    "median_ms_before": statistics.median(before),
}
json.dump(answer, open("/app/answer.json", "w"))
PY
