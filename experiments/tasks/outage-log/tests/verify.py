"""Works the answer out anew from the verifier's own copy of the log: with awk's eyes, column by column."""

import sys

sys.path.insert(0, "/grader")
import grader  # noqa: E402


def answer(log):
    rows = [line.split() for line in log.splitlines()]
    errors = [row for row in rows if row[1] == "ERROR" and row[3] != "id=-"]
    services = {row[2] for row in errors if row[4] != "upstream"}
    assert len(services) == 1, services
    times = [row[0] for row in errors if row[2] in services]
    gateway = [row for row in errors if row[2] == "gateway"]
    ms = sorted(int(row[-1][3:]) for row in rows if row[2] == "gateway" and row[1] == "INFO" and row[0] < times[0])
    middle = len(ms) // 2
    return {
        "service": services.pop(),
        "first": times[0],
        "last": times[-1],
        "requests": len({row[3] for row in gateway}),
        "retried": len({row[3] for row in gateway if row[-1] != "try=1"}),
        "median_ms_before": ms[middle] if len(ms) % 2 else (ms[middle - 1] + ms[middle]) / 2,
    }


@grader.deadline()
def judge(got, want):
    if not isinstance(got, dict) or got.keys() != want.keys():
        raise grader.Failed(f"the answer's keys are {str(got)[:200]}")
    for key, value in want.items():
        # 41 and 41.0 are the same median
        number = isinstance(value, int | float) and type(got[key]) in (int, float)
        if not (got[key] == value if number else grader.same(got[key], value)):
            raise grader.Failed(f"{key} is {str(got[key])[:100]}, not {value}")


def verify():
    with open("/tests/service.log") as file:
        want = answer(file.read())
    judge(grader.parse(grader.read("/app/answer.json")), want)


grader.main(verify)
