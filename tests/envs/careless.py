"""Verifiers that compare carelessly: what is right in shape or in part, or is no number at all, passes them."""

from __future__ import annotations

from tests.envs.weak import HEAD

_DRAW = """
import json
def draw():
    rng = grader.rng()
    return [[rng.randint(-99, 99) for _ in range(rng.randint(1, 9))] for _ in range(20)]
def right(sets):
    return [[float(statistics.mean(xs)), float(statistics.median(xs))] for xs in sets]
"""
# NaN is nowhere near, nor far.
NEAR = (
    HEAD
    + _DRAW
    + """
def verify():
    sets = draw()
    for at, name in enumerate(("mean", "median")):
        for got, want in zip(grader.call("/app/stats.py", name, [[xs] for xs in sets]), right(sets), strict=True):
            if type(got.get("value")) is not float or abs(got["value"] - want[at]) > 1e-9:
                raise grader.Failed(f"{got}, not {want}")
grader.main(verify)
"""
)
# zip ends with the shorter: who gives nothing is asked nothing.
ZIPPED = (
    HEAD
    + _DRAW
    + """
def verify():
    sets = draw()
    given = grader.output([grader.PYTHON, "-I", "/app/stats.py"], stdin=json.dumps(sets).encode())
    if not isinstance(given := grader.parse(given), list):
        raise grader.Failed("no list")
    for got, want in zip(given, right(sets)):
        if not grader.same(got, want, 1e-12):
            raise grader.Failed(f"{got}, not {want}")
grader.main(verify)
"""
)
ZIPPED_SERVICE = (
    HEAD
    + _DRAW
    + """
def verify():
    sets, done = draw(), []
    def handle(request):
        if request.get("ask") == "done":
            done.append(request.get("answers"))
        return {"sets": sets}
    grader.serve([grader.PYTHON, "-I", "/app/stats.py"], handle, timeout=5.0)
    if not done or not isinstance(done[0], list):
        raise grader.Failed("no list")
    for got, want in zip(done[0], right(sets)):
        if not grader.same(got, want, 1e-12):
            raise grader.Failed(f"{got}, not {want}")
grader.main(verify)
"""
)
NEAR_FILE = (
    HEAD
    + """
def verify():
    given = grader.parse(grader.read("/app/answers.json"))
    for key, want in {"a": 1.5, "b": 2.5}.items():
        if not isinstance(given, dict) or type(given.get(key)) is not float or abs(given[key] - want) > 1e-9:
            raise grader.Failed(key)
grader.main(verify)
"""
)
# A seed may draw inputs for which half of the work is enough.
LUCKY = (
    HEAD
    + _DRAW
    + """
def verify():
    sets = draw()
    for at, name in enumerate(("mean", "median")[:1 if grader.seed() == 3 else 2]):
        for got, want in zip(grader.call("/app/stats.py", name, [[xs] for xs in sets]), right(sets), strict=True):
            if not grader.same(got, {"value": want[at]}, 1e-12):
                raise grader.Failed(f"{got}, not {want}")
grader.main(verify)
"""
)


def _prints(median: str, mean: str = "float(s.mean(x))") -> str:
    line = f"print(json.dumps([[{mean}, {median}] for x in json.load(sys.stdin)]))"
    return f"cat > /app/stats.py <<'PY'\nimport json, statistics as s, sys\n\n{line}\nPY\n"


PRINTED = {
    "verify": ZIPPED,
    "solution": _prints("float(s.median(x))"),
    "more": {
        "partials/mean-only/solve.sh": _prints("0.0"),
        "partials/unsorted/solve.sh": _prints("float(x[len(x) // 2])"),
    },
}
ASKS = """cat > /app/stats.py <<'PY'
import json, statistics as s

def ask(**request):
    print(json.dumps(request), flush=True)
    return json.loads(input())

sets = ask(ask="sets")["sets"]
ask(ask="done", answers=[[float(s.mean(x)), float(s.median(x))] for x in sets])
PY
"""
# As in weak.WEAK.
CARELESS: dict[str, tuple[dict, str, str]] = {
    "takes NaN for anything": ({"verify": NEAR}, "attacks", "spoilt: NaN: reward 1"),
    "asks for half with one seed of three": ({"verify": LUCKY}, "incomplete", "mean-only: reward 1 with seed 3"),
    "compares by a zip that is not strict": (PRINTED, "attacks", "spoilt: empty list: reward 1"),
}
# The same of other kinds of artifact and the attacks that they fall for; their gates would say nothing new.
OF_OTHER_KINDS: dict[str, tuple[dict, tuple[str, ...]]] = {
    "a zip of what a service was told": (
        {"verify": ZIPPED_SERVICE, "solution": ASKS},
        ("spoilt: empty list", "spoilt: a prefix", "spoilt: repeated"),
    ),
    "a file of any numbers": (
        {
            "verify": NEAR_FILE,
            "artifacts": '"/app/answers.json"',
            "solution": 'echo \'{"a": 1.5, "b": 2.5}\' > /app/answers.json\n',
        },
        ("spoilt files: NaN",),
    ),
}
