"""A small task, its good verifier, and verifiers of the same task that are each weak in one way."""

from __future__ import annotations

from pathlib import Path

TOML = """
schema_version = "1.4"
artifacts = [{artifacts}]
[task]
name = "{name}"
[metadata.glm_jax]
base = "host-python"
[verifier]
environment_mode = "{mode}"
timeout_sec = {timeout}
[environment]
memory_mb = 256
storage_mb = 16
"""
INSTRUCTION = """\
Write /app/stats.py with mean(xs) and median(xs) of a list of numbers with at least one in it, as floats;
the median of an even number of values is the mean of the middle two. Raise nothing.
"""
START = "def mean(xs):\n    return 0.0\n\n\ndef median(xs):\n    return 0.0\n"
SOLUTION = """cat > /app/stats.py <<'PY'
def mean(xs):
    return float(sum(xs) / len(xs))


def median(xs):
    xs = sorted(xs)
    middle = len(xs) // 2
    return float(xs[middle] if len(xs) % 2 else (xs[middle - 1] + xs[middle]) / 2)
PY
"""
MEAN_ONLY = "sed -i '0,/return 0.0/s//return float(sum(xs) \\/ len(xs))/' /app/stats.py\n"
UNSORTED = SOLUTION.replace("sorted(xs)", "list(xs)")

HEAD = """import sys
sys.path.insert(0, "/grader")
import grader
import statistics
"""
GOOD = (
    HEAD
    + """
def verify():
    rng = grader.rng()
    cases = [[[rng.randint(-99, 99) for _ in range(rng.randint(1, 9))]] for _ in range(20)]
    for name in ("mean", "median"):
        for (xs,), got in zip(cases, grader.call("/app/stats.py", name, cases)):
            if not grader.same(got, {"value": float(getattr(statistics, name)(xs))}, 1e-12):
                raise grader.Failed(f"{name}({xs}) gave {got}")
grader.main(verify)
"""
)
TEST_SH = "python3 -I /tests/verify.py\n"
CASES = "[([1, 2, 3, 4], 2.5, 2.5), ([3, 1, 2], 2.0, 2.0)]"
TEST = f"""
import stats
def test_stats():
    for xs, mean, median in {CASES}:
        assert stats.mean(xs) == mean and stats.median(xs) == median
"""
REWARD = "r=$((! $?)); mkdir -p /logs/verifier; echo $r > /logs/verifier/reward.txt\n"
PYTEST = f"cd /tests && PYTHONPATH=/app python3 -m pytest -q -p no:cacheprovider test_stats.py; {REWARD}"
ASSERTS = f"""PYTHONPATH=/app python3 -c 'exec(open("/tests/test_stats.py").read()); test_stats()'; {REWARD}"""
OUTSIDE = """import json, os, random, statistics, subprocess, sys
code = '''
import sys, json
sys.path.insert(0, "/app")
import stats
print(json.dumps([[stats.mean(x), stats.median(x)] for x in json.loads(sys.argv[1])]))
'''
sets = [[random.randint(-99, 99) for _ in range(random.randint(1, 9))] for _ in range(20)]
done = subprocess.run([sys.executable, "-c", code, json.dumps(sets)], capture_output=True, text=True)
try:
    good = json.loads(done.stdout) == [[statistics.mean(x), statistics.median(x)] for x in sets]
except ValueError:
    good = False
if not os.path.exists("/logs/verifier/reward.txt"):
    open("/logs/verifier/reward.txt", "w").write(str(int(good)))
"""
FIXED = GOOD.replace("grader.rng()", "__import__('random').Random(7)")
SPOOFABLE = (
    HEAD
    + """
CODE = '''
import sys
sys.path.insert(0, "/app")
import stats
print("PASSED" if stats.mean([1, 2]) == 1.5 and stats.median([3, 1, 2]) == 2 else "FAILED")
'''
def verify():
    if b"PASSED" not in grader.output([grader.PYTHON, "-c", CODE]):
        raise grader.Failed("not passed")
grader.main(verify)
"""
)
UNPICKLES = (
    HEAD
    + """
import pickle
def verify():
    try:
        pickle.load(open("/app/stats.py", "rb"))
    except Exception:
        pass
    exec(compile(open("/tests/good.py").read().replace("grader.main(verify)", "verify()"), "good", "exec"), {})
grader.main(verify)
"""
)
ALWAYS = HEAD + "grader.main(lambda: None)\n"
EXISTS = HEAD + "grader.main(lambda: {'size': float(len(grader.read('/app/stats.py')))})\n"
MEAN_CHECKED = GOOD.replace('("mean", "median")', '("mean",)')
FLAKY = GOOD.replace(
    "def verify():", "def verify():\n    if grader.seed() == 2:\n        raise grader.Failed('unlucky')"
)
CRASHES = HEAD + "raise KeyError('oops')\n"
HANGS = HEAD + "import time\ntime.sleep(1000)\n"
CRASHES_ON_WRONG = GOOD.replace("raise grader.Failed", "raise ValueError")
NO_REWARD = "true\n"
NOT_FINITE = "mkdir -p /logs/verifier; echo nan > /logs/verifier/reward.txt\n"
SAME_PROCESS = (
    HEAD
    + """
sys.path.insert(0, "/app")
def same(a, b):
    return a == b
def check():
    import stats
    rng = grader.rng()
    for _ in range(20):
        xs = [rng.randint(-99, 99) for _ in range(rng.randint(1, 9))]
        want = statistics.mean(xs)
        if not same(stats.mean(xs), want):
            raise ValueError("mean")
        want = statistics.median(xs)
        if not same(stats.median(xs), want):
            raise ValueError("median")
def verify():
    try:
        check()
    except Exception as error:
        raise grader.Failed(repr(error))
grader.main(verify)
"""
)
# Checks every answer that is given, and asks for none.
VACUOUS = (
    HEAD
    + """
import json
def verify():
    try:
        given = json.loads(grader.read("/app/answers.json"))
    except (ValueError, RecursionError) as error:
        raise grader.Failed(str(error))
    if not isinstance(given, dict):
        raise grader.Failed("no table")
    want = {"a": 1, "b": 2}
    for key, value in given.items():
        if key not in want or value != want[key]:
            raise grader.Failed(key)
grader.main(verify)
"""
)
# The candidate's own process tells how long it took.
OWN_CLOCK = GOOD.replace(
    "grader.main(verify)",
    '''
def timed():
    verify()
    code = """import json, sys, time
sys.path.insert(0, "/app")
from stats import median
begin = time.perf_counter(); median(list(range(1000))); print(time.perf_counter() - begin)"""
    if float(grader.output([grader.PYTHON, "-c", code])) > 0.05:
        raise grader.Failed("too slow")
grader.main(timed)
''',
)
SLOW_WITH_A_PATCHED_CLOCK = (
    SOLUTION.replace("    xs = sorted(xs)\n", "    xs = sorted(xs)\n    pause(0.1 * (len(xs) > 99))\n").removesuffix(
        "PY\n"
    )
    + "\n\nimport time\n\npause = time.sleep\ntime.perf_counter = lambda: 0.0\nPY\n"
)


def write(
    folder: Path,
    verify: str = GOOD,
    *,
    test_sh: str = TEST_SH,
    mode: str = "separate",
    artifacts: str = '"/app/stats.py"',
    timeout: float = 30.0,
    solution: str = SOLUTION,
    more: dict[str, str] | None = None,
) -> Path:
    """The task in a folder, with the verifier that is wanted."""
    files = {
        "task.toml": TOML.format(name=folder.name, mode=mode, artifacts=artifacts, timeout=timeout),
        "instruction.md": INSTRUCTION,
        "environment/files/stats.py": START,
        "solution/solve.sh": solution,
        "partials/mean-only/solve.sh": MEAN_ONLY,
        "partials/unsorted/solve.sh": UNSORTED,
        "tests/test.sh": test_sh,
        "tests/verify.py": verify,
        "tests/test_stats.py": TEST,
        "tests/good.py": GOOD,
    }
    for name, text in (files | (more or {})).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


# name -> (how the task is written, the gate that has to refuse it, a trial that has to be among the reasons)
ANSWERS = {
    "solution/solve.sh": 'echo \'{"a": 1, "b": 2}\' > /app/answers.json\n',
    "partials/mean-only/solve.sh": "echo '{\"a\": 2}' > /app/answers.json\n",
    "partials/unsorted/solve.sh": 'echo \'{"a": 1, "b": 3}\' > /app/answers.json\n',
}
WEAK: dict[str, tuple[dict, str, str]] = {
    "shares the agent's box": ({"test_sh": PYTEST, "mode": "shared"}, "lint", "shares the agent's box"),
    "pytest imports the candidate": ({"test_sh": PYTEST}, "attacks", "python: always-equal: reward 1"),
    "asserts and an exit code": ({"test_sh": ASSERTS}, "attacks", "python: always-equal: reward 1"),
    "pytest in a folder of the agent's": (
        {
            "test_sh": PYTEST.replace("cd /tests", "cd /app").replace("test_stats.py", "/tests/test_stats.py"),
            "artifacts": '"/app"',
        },
        "attacks",
        "modules-planted: reward 1",
    ),
    "the candidate beside the driver": ({"verify": OUTSIDE}, "attacks", "python: done-later: reward 1"),
    "the same inputs each time": ({"verify": FIXED}, "attacks", "recorded-answers: reward 1"),
    "believes what is printed": ({"verify": SPOOFABLE}, "attacks", "python: always-equal: reward 1"),
    "scores in the candidate's process": (
        {"verify": SAME_PROCESS},
        "attacks",
        "python: abort: error: the verifier crashed",
    ),
    "unpickles": ({"verify": UNPICKLES}, "attacks", "data: a pickle: reward 1"),
    "the candidate's own clock": (
        {"verify": OWN_CLOCK, "more": {"attacks/patched-clock/solve.sh": SLOW_WITH_A_PATCHED_CLOCK}},
        "attacks",
        "patched-clock: reward 1",
    ),
    "always rewards": ({"verify": ALWAYS}, "no-op", "nothing done: reward 1"),
    "looks whether there is a file": ({"verify": EXISTS}, "no-op", "nothing done: reward 1"),
    "checks half of the work": ({"verify": MEAN_CHECKED}, "incomplete", "mean-only: reward 1"),
    "nothing asked, nothing wrong": (
        {"verify": VACUOUS, "artifacts": '"/app/answers.json"', "more": ANSWERS},
        "incomplete",
        "without 'a': reward 1",
    ),
    "flaky": ({"verify": FLAKY}, "oracle", "seed 2: reward 0"),
    "crashes": ({"verify": CRASHES}, "oracle", "the verifier crashed with code 1"),
    "hangs": ({"verify": HANGS, "timeout": 0.5}, "oracle", "the verifier took more than 0.5 s"),
    "crashes on wrong work": ({"verify": CRASHES_ON_WRONG}, "no-op", "nothing done: error: the verifier crashed"),
    "writes no reward": ({"test_sh": NO_REWARD}, "oracle", "wrote neither"),
    "writes no number": ({"test_sh": NOT_FINITE}, "oracle", "reward = nan; it has to be a finite number"),
    "the oracle fails": ({"solution": "exit 3\n"}, "oracle", "solve.sh ended with code 3"),
    "the oracle does nothing": (
        {"verify": ALWAYS, "solution": "true\n"},
        "no-op",
        "the oracle leaves the artifacts as they were",
    ),
    "partials that are one": (
        {"more": {"partials/unsorted/solve.sh": MEAN_ONLY}},
        "incomplete",
        "1 partial solutions differ from the oracle; 2 are wanted",
    ),
}

# How the tests of some public benchmarks run; its gates take long, so it is attacked directly alone.
COPIED = {
    "tests copied to the agent's files": {
        "test_sh": PYTEST.replace("cd /tests", "cp /tests/test_stats.py /app/; cd /app"),
        "artifacts": '"/app"',
    }
}

# Attacks that succeed against a weak verifier: what the battery holds has teeth.
TEETH = [
    ("pytest imports the candidate", "python: os-exit"),
    ("asserts and an exit code", "python: sys-exit"),
    ("asserts and an exit code", "python: another-program"),
    ("pytest in a folder of the agent's", "modules-planted"),
    ("tests copied to the agent's files", "pytest-configured"),
    ("the candidate beside the driver", "python: reward-written"),
    ("believes what is printed", "python: output-spoofed"),
    ("scores in the candidate's process", "python: frames-searched"),
    ("scores in the candidate's process", "python: scorer-patched"),
    ("unpickles", "data: a pickle"),
    ("the candidate's own clock", "patched-clock"),
]
