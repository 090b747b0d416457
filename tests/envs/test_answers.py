"""Right answers, each spoilt in one way: values, texts, requests, and programs, run here as a verifier would."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from glm_jax.envs.gates import answers, spoil
from glm_jax.envs.sandbox.files import File

LAST = '{"ask": "done", "texts": [[1, 2], [3]]}\n'


@pytest.mark.parametrize(
    ("name", "right", "spoilt"),
    [
        ("NaN", {"a": [1, "x", True], "b": {"c": 2.5}}, '{"a": [NaN, "x", true], "b": {"c": NaN}}'),
        ("inf", 10**400, "Infinity"),
        ("-inf", ["x"], "-Infinity"),  # no number to take the place of
        ("empty list", 1, "[]"),
        ("empty text", 1, '""'),
        ("null", [1], "null"),
        ("a prefix", [1, 2, 3], "[1]"),
        ("a prefix", {"a": 1, "b": 2}, '{"a": 1}'),
        ("a prefix", 7, "7"),
        ("repeated", [1, 2], "[1, 2, 1, 2]"),
        ("repeated", "ab", '"abab"'),
        ("repeated", 7, "7"),
    ],
)
def test_a_value_is_spoilt_in_its_shape(name: str, right, spoilt: str):
    assert json.dumps(spoil.value(name, right)) == spoilt


@pytest.mark.parametrize(
    ("name", "right", "spoilt"),
    [
        ("NaN", '{"a": 1}\n', '{"a": NaN}'),
        ("-inf", "1\n2.5\n", "-Infinity\n-Infinity\n"),  # each line is JSON
        ("inf", "7 10.0.0.1 v2\n", "inf 10.0.0.1 v2\n"),  # an address is no number
        ("NaN", "PASSED\n", "nan"),
        ("empty text", "7\n", ""),
        ("empty text", "[7]\n", '""'),
        ("null", "a = 1\n", "null"),
        ("a prefix", "a\nb\nc\n", "a\n"),
        ("a prefix", "word\n", "wo"),
        ("repeated", '{"a": 1}\n', '{"a": 1}\n{"a": 1}\n'),
    ],
)
def test_a_text_is_spoilt_as_json_or_by_its_numbers_and_lines(name: str, right: str, spoilt: str):
    assert spoil.text(name, right) == spoilt


def test_of_requests_those_are_spoilt_that_look_like_the_last():
    assert json.loads(spoil.request("a prefix", LAST, LAST)) == {"ask": "done", "texts": [[1, 2]]}
    other = '{"ask": "step", "texts": [[1, 2]]}\n'
    assert spoil.request("a prefix", other, LAST) == other


def run(argv: list[str], stdin: str) -> str:
    return subprocess.run(argv, input=stdin, capture_output=True, text=True, check=True).stdout


def test_a_program_does_what_the_oracles_does_and_spoils_what_comes_of_it(tmp_path):
    """One that prints, in Python and in a shell; a module of functions; one that asks a service."""
    (tmp_path / "helper.py").write_text("def double(x):\n    return [x, 2 * x]\n")
    prints = "import sys\nfrom helper import double\nprint(double(int(sys.stdin.read())), *sys.argv[1:])\n"
    asks = 'import json\nprint(json.dumps({"ask": "it"}), flush=True)\n'
    asks += 'print(json.dumps({"ask": "done", "texts": [int(input()), 1]}))\n'
    for name, source, entry, given, said in (
        ("p.py", prints, {"argv": ["PATH", "-x"], "out": "[1] -x\n"}, "4", "[nan, nan] -x\n"),
        ("p.sh", 'echo "$(cat) $1"', {"argv": ["PATH", "-x"], "out": "1 -x\n"}, "4", "nan -x\n"),
        ("s.py", asks, {"argv": ["PATH"], "last": LAST}, "4", '{"ask": "it"}\n{"ask": "done", "texts": [NaN, NaN]}\n'),
    ):
        path = str(tmp_path / name)
        entry["argv"] = [path if word == "PATH" else word for word in entry["argv"]]
        cases, left_out = answers.spoilt({}, {path: File(source.encode(), 0o755)}, [entry])
        forged = cases["spoilt: NaN"][path]
        assert forged.mode == 0o755 and not left_out
        (tmp_path / "forged").write_bytes(forged.data)
        start = "bash" if name.endswith("sh") else sys.executable
        assert run([start, str(tmp_path / "forged"), *entry["argv"][1:]], given) == said, name
    module = str(tmp_path / "helper.py")
    entry = {"path": module, "function": "double", "found": [{"value": [1, 2]}, {"raised": "KeyError"}]}
    cases, _ = answers.spoilt({}, {module: File((tmp_path / "helper.py").read_bytes())}, [entry])
    (tmp_path / "forged.py").write_bytes(cases["spoilt: repeated"][module].data)
    use = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); from forged import double; print(double(2))"
    assert run([sys.executable, "-c", use], "") == "[2, 4, 2, 4]\n"


def test_what_would_leave_every_answer_as_it_is_is_left_out_with_the_reason():
    oracle = {"/app/f.py": File(b"real"), "/app/helper.py": File(b"h"), "/app/out.txt": File(b"")}
    record = [{"path": "/app/f.py", "function": "f", "found": [{"value": 1.5}, {"value": None}]}]
    cases, left_out = answers.spoilt({}, oracle, record)
    assert left_out == {
        **{f"spoilt: {name}": answers.SAME for name in ("a prefix", "repeated")},
        **{f"spoilt files: {name}": answers.SAME for name in ("empty text", "a prefix", "repeated")},
    }
    assert cases["spoilt: NaN"]["/app/helper.py"] == File(b"h")  # nobody asks it
    cases, left_out = answers.spoilt({"/app/out.txt": File(b"")}, oracle, ())
    assert left_out == {f"spoilt: {name}": answers.UNKNOWN for name in ("a prefix", "repeated")}
    assert cases["spoilt: NaN"]["/app/helper.py"] != File(b"h")
