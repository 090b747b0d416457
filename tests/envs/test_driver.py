"""The library that tests of tasks import: what it reads of a candidate, for how long, how it compares and scores."""

from __future__ import annotations

import importlib
import json
import sys
import time
from pathlib import Path

import pytest

from glm_jax.envs.verify import driver


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """It as it lies in a driver's box: files beside its settings, which find each other by their plain names."""
    folder = tmp_path_factory.mktemp("grader")
    (folder / "settings.json").write_text(json.dumps({"python": sys.executable}))
    for path in Path(driver.__file__).parent.glob("*.py"):
        (folder / path.name).write_text(path.read_text())
    before = {*sys.modules}
    sys.path.insert(0, str(folder))
    yield importlib.import_module("grader")
    sys.path.remove(str(folder))
    for name in {*sys.modules} - before:
        if getattr(sys.modules[name], "__file__", "").startswith(str(folder)):
            del sys.modules[name]


def test_time_that_is_up_fails_the_candidate_whatever_the_code_expects_of_its_data(library):
    """Inside another deadline, which goes on afterwards and is then up as well."""
    begin = time.monotonic()
    with pytest.raises(library.Failed, match="took more than 0.5 s to read"), library.deadline(0.5):
        with pytest.raises(library.Failed, match="took more than 0.05 s to read"), library.deadline(0.05):
            while True:
                try:
                    sum(range(1000))
                except Exception:
                    continue
        assert time.monotonic() - begin < 0.4
        while True:
            sum(range(1000))
    time.sleep(0.15)  # no alarm is left


def test_a_function_has_its_deadline_anew_at_each_call(library):
    wait = library.deadline(0.4)(time.sleep)
    wait(0.25)
    wait(0.25)
    with pytest.raises(library.Failed):
        wait(5.0)


def test_a_candidate_has_four_fifths_of_the_verifiers_time_in_all(library, monkeypatch):
    monkeypatch.setattr(sys.modules["patience"], "_left", 0.5)
    with library.deadline(), library.deadline():  # the time within counts once
        time.sleep(0.3)
    with pytest.raises(library.Failed, match="took more than 0.[012]"), library.deadline():
        time.sleep(5.0)
    with pytest.raises(library.Failed, match="it has taken four fifths of the verifier's time"), library.deadline():
        pass


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a" + ".a" * 400_000, "has more than 65536 bytes"),
        ("a" + ".a" * 30_000, "30000 dots in a line; 200 are read"),
        ("a." * 150 + "a = 1", "nested more than 50 deep"),
        ("a = " + "[" * 3000, "is no TOML"),
        ('a = "\\ud800"', "is no TOML"),
    ],
)
def test_toml_that_takes_long_to_read_or_cannot_be_fails_the_candidate_at_once(library, tmp_path, text, said):
    (tmp_path / "x.toml").write_text(text)
    begin = time.monotonic()
    with pytest.raises(library.Failed, match=said):
        library.toml(str(tmp_path / "x.toml"))
    assert time.monotonic() - begin < 2.0
    (tmp_path / "x.toml").write_text("a.b = [1.5, 2]")
    assert library.toml(str(tmp_path / "x.toml")) == {"a": {"b": [1.5, 2]}}


@pytest.mark.parametrize(
    ("got", "want", "tolerance", "equal"),
    [
        (1, 1, 0, True),
        (1, 1.0, 0, False),
        (True, 1, 0, False),
        (1.0, 1.0 + 1e-9, 1e-6, True),
        (1.0, 1.1, 1e-6, False),
        (float("nan"), 1.0, 1e9, False),
        ([1, [2]], [1, [2]], 0, True),
        ([1], [1, 2], 0, False),
        ({"a": 1}, {"a": 1, "b": 2}, 0, False),
        ("1", 1, 0, False),
        (None, None, 0, True),
    ],
)
def test_values_are_the_same_with_their_types(library, got, want, tolerance: float, equal: bool):
    assert library.same(got, want, tolerance) is equal


@pytest.mark.parametrize(
    "data", [b"", b"{", b"[" * 100_000, b"[" * 60 + b"]" * 60, b"9" * 5000, b"\xff", b"[" + b"0," * 300_000 + b"0]"]
)
def test_what_is_no_plain_json_fails_the_candidate_and_not_the_verifier(library, data: bytes):
    with pytest.raises(library.Failed):
        library.parse(data)
    assert library.parse(b'{"a": [1, {"b": null}]}') == {"a": [1, {"b": None}]}


def test_a_score_is_the_way_from_the_start_to_the_best_on_a_log_scale(library):
    assert library.score(100, 100, 1) == 0.0 and library.score(1, 100, 1) == 1.0
    assert library.score(10, 100, 1) == pytest.approx(0.5)
    assert library.score(1000, 100, 1) == 0.0 and library.score(0.1, 100, 1) == 1.0
    with pytest.raises(ValueError):
        library.score(1, 1, 1)
