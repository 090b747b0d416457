"""Parts of tasks and gates that need no box: partials, lint, recorded answers, records, rewards, comparisons."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from glm_jax.cli.main import main
from glm_jax.envs.gates import attacks, record
from glm_jax.envs.gates.lint import lint
from glm_jax.envs.gates.partials import derived
from glm_jax.envs.gates.record import Gate, Record, Trial, UngatedTask, admitted
from glm_jax.envs.gates.replay import replay
from glm_jax.envs.sandbox.files import File
from glm_jax.envs.tasks.harbor import read_task
from glm_jax.envs.verify.grade import LOGS, read_reward
from tests.envs.weak import SOLUTION, write

SHIPPED = Path(__file__).resolve().parents[2] / "experiments" / "tasks"


def texts(found: dict[str, dict[str, File]]) -> dict[str, dict[str, str]]:
    return {name: {path: file.data.decode() for path, file in files.items()} for name, files in found.items()}


def test_partials_leave_out_one_part_each():
    start = {"/app/a.py": File(b"x = 1\ny = 2\n"), "/app/old": File(b"old")}
    oracle = {
        "/app/a.py": File(b"x = 10\ny = 2\n# a comment\nz = 3\n"),
        "/app/new.py": File(b'"""Doc."""\nimport os\n\n\ndef f(x):\n    if x:\n        return 1\n    return 2\n'),
        "/app/out.json": File(b'{"a": 1, "b": 2}'),
    }
    found = texts(derived(start, oracle))
    assert found["/app/old kept"]["/app/old"] == "old"
    assert found["/app/a.py as it was"]["/app/a.py"] == "x = 1\ny = 2\n"
    assert "/app/new.py" not in found["no /app/new.py"]
    assert found["half of /app/a.py"]["/app/a.py"] == "x = 10\ny = 2\n"
    assert found["/app/a.py without the change at line 1"]["/app/a.py"] == "x = 1\ny = 2\n# a comment\nz = 3\n"
    assert found["/app/new.py without the statement at line 7"]["/app/new.py"].endswith(
        "    if x:\n        pass\n    return 2\n"
    )
    assert found["/app/new.py without the statement at line 5"]["/app/new.py"] == '"""Doc."""\nimport os\n\n\npass\n'
    assert found["/app/out.json without 'a'"]["/app/out.json"] == '{"b": 2}'
    assert not any("line 1" in name and "new.py" in name for name in found)  # the docstring stays
    assert all(files not in (texts({"": start})[""], texts({"": oracle})[""]) for files in found.values())


def test_partials_of_what_is_no_python_after_all_are_the_file_and_its_half():
    found = derived({}, {"/app/x.py": File(b"this is\nno python\n"), "/app/y": File(b"\xff\n")})
    assert set(found) == {"no /app/x.py", "half of /app/x.py", "no /app/y", "half of /app/y"}


def test_lint_finds_what_can_be_seen_without_running(tmp_path):
    assert lint(read_task(write(tmp_path / "good"))) == []
    solution = SOLUTION.removeprefix("cat > /app/stats.py <<'PY'\n")
    key = "-----BEGIN RSA PRIVATE " + "KEY-----\n"
    more = {
        "environment/files/.backup.py": solution,
        "environment/files/.env": "",
        "environment/files/notes.txt": key + "gh" + "p_" + "a" * 36,
        "environment/files/.git/HEAD": "ref: refs/heads/main\n",
        "partials/mean-only/solve.sh": "curl https://x\n",
    }
    bad = write(tmp_path / "bad", mode="shared", more=more)
    (bad / "instruction.md").write_text("Do it.\n")
    said = "\n".join(lint(read_task(bad)))
    for text in (
        "the verifier shares the agent's box",
        "instruction.md says next to nothing",
        "holds a git repository, whose history may hold the solution",
        "/app/.env has the name of a file of secrets",
        "/app/notes.txt holds what looks like a private key",
        "/app/notes.txt holds what looks like an access key",
        "% of the solution's text",
        "partials/mean-only/solve.sh wants the network: 'curl'",
    ):
        assert text in said, said
    assert "/app/.backup.py holds" in said


def test_an_unpinned_package_in_a_dockerfile_is_found(tmp_path):
    folder = write(tmp_path / "task")
    toml = (folder / "task.toml").read_text().replace('[metadata.glm_jax]\nbase = "host-python"\n', "")
    (folder / "task.toml").write_text(toml)
    (folder / "environment" / "Dockerfile").write_text(
        "FROM python:3.11-slim\nWORKDIR /app\nRUN pip install numpy\nCOPY files/ /app/\n"
    )
    assert lint(read_task(folder)) == ["environment/Dockerfile:3 installs a package without its version"]


def test_recorded_answers_are_given_again():
    """The forged programs are run here, as a verifier would run them."""
    oracle = {"/app/f.py": File(b"real")}
    calls = [{"function": "double", "cases": [[1], [2]], "found": [{"value": 2}, {"value": 4}]}]
    forged = replay({}, oracle, calls)["/app/f.py"].data.decode()
    code = f"{forged}\nd = __getattr__('double')\nprint(d(2), d(1), d(9))\n"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "4 2 2\n"
    runs = [{"argv": ["python3", "/app/f.py", "-x"], "stdin": "q", "files": {}, "out": "A\n"}]
    runs.append({**runs[0], "stdin": "r", "out": "B\n"})
    for path, start in (("/app/f.py", [sys.executable, "-c"]), ("/app/f.sh", ["bash", "-c"])):
        forged = replay({}, {path: File(b"real")}, runs)[path].data.decode()
        argv = [*start, forged, *(["bash"] if path.endswith("sh") else []), "-x"]
        for stdin, out in (("r", "B\n"), ("q", "A\n"), ("new", "A\n")):
            done = subprocess.run(argv, input=stdin, capture_output=True, text=True)
            assert done.stdout == out, done.stderr
    assert replay({}, oracle, ()) is None and replay({}, {"/app/x.json": File(b"1")}, runs) is None


def test_every_file_that_the_oracle_changed_is_forged_and_no_other():
    start = {"/app/kept": File(b"k"), "/app/a.py": File(b"old")}
    oracle = {"/app/kept": File(b"k"), "/app/a.py": File(b"new", 0o755), "/app/b.sh": File(b"s"), "/app/c": File(b"c")}
    found = attacks.forgeries(start, oracle)
    assert all(files["/app/kept"] == File(b"k") for files in found.values())
    python, shell, data = (found[f"{name}"] for name in ("python: os-exit", "shell: exit-zero", "data: {}"))
    assert b"_exit(0)" in python["/app/a.py"].data and python["/app/a.py"].mode == 0o755
    assert (
        python["/app/b.sh"] == File(b"s")
        and shell["/app/a.py"].data == b"new"
        and shell["/app/b.sh"].data == b"exit 0\n"
    )
    assert {data[path].data for path in ("/app/a.py", "/app/b.sh", "/app/c")} == {b"{}"}


def test_the_battery_covers_the_known_kinds_of_hack(tmp_path):
    scripts = attacks.scripts(read_task(write(tmp_path / "task")))
    assert len(scripts) >= 15 and len(attacks.data()) >= 12
    assert all(tree["solve.sh"].data.startswith(b"set -- /app/stats.py\n") for tree in scripts.values())


# ------------------------------------------------------------------------------------------------ records


def test_a_record_survives_its_file_and_opens_the_door_only_while_it_is_true(tmp_path):
    folder = write(tmp_path / "task")
    bundle = read_task(folder).bundle
    trials = (Trial("seed 1", 1.0), Trial("x", None, "skipped"), Trial("half", 0.0, tried=3))
    others = tuple(Gate(name, "") for name in ("no-op", "incomplete", "attacks"))
    good = Record(bundle, (Gate("lint", ""), Gate("oracle", "", trials), *others))
    record.write(folder, good)
    assert record.read(folder) == good and admitted(folder).name == "task"
    told = json.loads((folder / "gates.json").read_text())["gates"][1]["trials"]
    assert told == {"seed 1": 1.0, "x": "skipped", "half": {"found": 0.0, "tried": 3}}
    for bad, message in (
        (Record("0" * 64, good.gates), "was changed after it went through the gates"),
        (Record(bundle, (*good.gates[:2], Gate("no-op", "nothing done: reward 1"))), "did not pass the gate 'no-op'"),
        (Record(bundle, good.gates, pipeline=0), f"gates of version 0, now {record.PIPELINE}"),
        (Record(bundle, ()), "holds no gate lint, oracle, no-op, incomplete, attacks"),
        (Record(bundle, good.gates[:3]), "holds no gate incomplete, attacks"),
        (Record(bundle, (*good.gates[:4], Gate("attacks", None))), "is no record of gates"),
    ):
        record.write(folder, bad)
        with pytest.raises(UngatedTask, match=message):
            admitted(folder)
    for text in ('{"passed": true}', "[" * 200_000):
        (folder / "gates.json").write_text(text)
        with pytest.raises(UngatedTask, match="is no record of gates"):
            admitted(folder)
    (folder / "gates.json").unlink()
    os.mkfifo(folder / "gates.json")
    with pytest.raises(UngatedTask, match="is no record of gates"):
        admitted(folder)
    (folder / "gates.json").unlink()
    with pytest.raises(UngatedTask, match="glm-jax envs check"):
        admitted(folder)


def test_shipped_tasks_ship_with_a_current_record():
    assert [admitted(path).folder.name for path in sorted(SHIPPED.iterdir())] == sorted(
        p.name for p in SHIPPED.iterdir()
    )


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["envs"], "which action"),
        (["envs", "chekc"], "'chekc' is no action"),
        (["envs", "check"], "got nothing where DIR... is wanted"),
        (["envs", "check", "/nowhere"], "/nowhere is no folder"),
        (["envs", "check", "."], "is no task and holds none"),
    ],
)
def test_a_command_line_that_makes_no_sense_is_told_so(tmp_path, monkeypatch, capsys, argv: list[str], message: str):
    monkeypatch.chdir(tmp_path)
    assert main(argv) == 2
    assert message in capsys.readouterr().err


# ------------------------------------------------------------------------------------------------ rewards


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "wrote neither"),
        ({"reward.txt": "one"}, "holds b'one', which is no number"),
        ({"reward.txt": "nan"}, "reward = nan; it has to be a finite number"),
        ({"reward.txt": "1.5"}, "the reward 1.5; it lies between 0 and 1"),
        ({"reward.json": "{"}, "is no JSON"),
        ({"reward.json": '{"score": 1}'}, "a table with the key reward"),
        ({"reward.json": '{"reward": true}'}, "reward = True; it has to be a finite number"),
        ({"reward.json": '{"reward": 1, "speed": "fast"}'}, "speed = 'fast'"),
        ({"reward.json": '{"reward": Infinity}'}, "reward = inf"),
    ],
)
def test_a_reward_that_is_none_is_an_error(files: dict[str, str], message: str):
    with pytest.raises(ValueError) as caught:
        read_reward({f"{LOGS}/{name}": File(text.encode()) for name, text in files.items()})
    assert message in str(caught.value)


def test_a_reward_comes_with_its_metrics():
    assert read_reward({f"{LOGS}/reward.txt": File(b" 0.5\n")}) == (0.5, {})
    data = {f"{LOGS}/reward.json": File(b'{"reward": 1, "cost": 7}'), f"{LOGS}/reward.txt": File(b"0")}
    assert read_reward(data) == (1.0, {"cost": 7.0})
