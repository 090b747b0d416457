# Right but for the requests: every try is counted as one.
python3 - <<'PY'
import json
import re
import statistics

lines = [line.split(None, 3) for line in open("/app/service.log")]
own = [line[0] for line in lines if line[1] == "ERROR" and line[2] == "ledger"]
failed = [line for line in lines if line[1] == "ERROR" and line[2] == "gateway"]
ms = [int(re.search(r"ms=(\d+)", line[3])[1]) for line in lines if line[2] == "gateway" and " ok " in line[3] and line[0] < own[0]]
json.dump({"service": "ledger", "first": own[0], "last": own[-1], "requests": len(failed),
           "retried": sum("try=1" not in line[3] for line in failed), "median_ms_before": statistics.median(ms)},
          open("/app/answer.json", "w"))
PY
