"""The gates: tasks that ship pass them, weak verifiers are refused by the gate that finds their weakness."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from glm_jax.cli.main import main
from glm_jax.envs.gates import answers, attacks, pipeline
from glm_jax.envs.gates.record import UngatedTask, admitted
from glm_jax.envs.gates.replay import replay
from glm_jax.envs.sandbox.box import Collected
from glm_jax.envs.sandbox.files import File
from glm_jax.envs.tasks.harbor import read_task
from glm_jax.envs.verify.attempt import agent_box, scripted
from glm_jax.envs.verify.grade import grade, grade_in_place
from tests.envs.careless import CARELESS, OF_OTHER_KINDS
from tests.envs.weak import COPIED, TEETH, WEAK, write

pytestmark = pytest.mark.envs
SHIPPED = Path(__file__).resolve().parents[2] / "experiments" / "tasks"


@pytest.mark.parametrize("folder", sorted(SHIPPED.iterdir()), ids=lambda path: path.name)
def test_a_shipped_task_passes_every_gate(folder: Path):
    found = pipeline.check(folder)
    assert found.passed, f"{found.failing.name}: {found.failing.why}"
    assert [gate.name for gate in found.gates] == ["lint", "oracle", "no-op", "incomplete", "attacks"]
    assert len(found.gates[-1].trials) >= 30


@pytest.mark.parametrize("name", [*WEAK, *CARELESS])
def test_a_weak_verifier_is_refused_by_name_of_the_gate(tmp_path, name: str):
    how, gate, reason = (WEAK | CARELESS)[name]
    found = pipeline.check(write(tmp_path / "stats", **how))
    assert found.failing is not None, "it passed"
    assert found.failing.name == gate, found.failing
    assert reason in found.failing.why


@pytest.mark.parametrize(("name", "attack"), TEETH)
def test_an_attack_of_the_battery_succeeds_where_it_should(tmp_path, name: str, attack: str):
    task = read_task(write(tmp_path / "stats", **(COPIED[name] if name in COPIED else WEAK[name][0])))
    start, solved = (scripted(task, tree)[0].files for tree in (attacks.agent("true"), task.solution))
    scripts = attacks.scripts(task) | dict(task.attacks)
    if attack in scripts:
        files = scripted(task, scripts[attack])[0].files
    else:
        files = attacks.forgeries(start, solved)[attack]
    assert grade(task, Collected(files, ())).reward == 1.0


@pytest.mark.parametrize("name", OF_OTHER_KINDS)
def test_spoilt_answers_of_every_kind_pass_a_careless_comparison_and_no_others_do(tmp_path, name: str):
    how, succeed = OF_OTHER_KINDS[name]
    task = read_task(write(tmp_path / "stats", **how))
    start, solved = (scripted(task, tree)[0] for tree in (attacks.agent("true"), task.solution))
    cases, _ = answers.spoilt(start.files, solved.files, grade(task, solved, record=True).record)
    assert tuple(case for case in cases if grade(task, Collected(cases[case], ())).reward != 0.0) == succeed


@pytest.mark.parametrize("name", ["top-clients", "orders-report", "retrace-storm"])
def test_recorded_answers_pass_where_inputs_are_not_drawn_anew(tmp_path, name: str):
    """Scripts and programs, with files and input: a shipped task passes until its seed is fixed."""
    folder = shutil.copytree(SHIPPED / name, tmp_path / name)
    verify = folder / "tests" / "verify.py"
    verify.write_text(verify.read_text().replace("grader.rng()", "__import__('random').Random(3)"))
    task = read_task(folder)
    start, solved = (scripted(task, tree)[0] for tree in (attacks.agent("true"), task.solution))
    again = replay(start.files, solved.files, grade(task, solved, record=True).record)
    assert grade(task, Collected(again, ())).reward == 1.0
    assert grade(read_task(SHIPPED / name), Collected(again, ())).reward == 0.0


def test_the_good_verifier_of_the_same_task_passes_and_any_change_voids_it(tmp_path, capsys):
    folder = write(tmp_path / "stats")
    with pytest.raises(UngatedTask, match="has not been through the gates: glm-jax envs check"):
        admitted(folder)
    assert main(["envs", "check", str(folder)]) == 0
    assert "stats  passed" in capsys.readouterr().out
    assert admitted(folder).name == "stats"
    (folder / "tests" / "good.py").write_text("# a change\n")
    with pytest.raises(UngatedTask, match="was changed after it went through the gates"):
        admitted(folder)


def test_the_command_names_the_gate_and_why_and_fails(tmp_path, capsys):
    write(tmp_path / "half", WEAK["checks half of the work"][0]["verify"])
    (tmp_path / "torn").mkdir()
    (tmp_path / "torn" / "task.toml").write_text("x = ")
    assert main(["envs", "check", str(tmp_path)]) == 1
    out = capsys.readouterr().out
    assert "3 passed" in out and "refused by incomplete: mean-only: reward 1" in out
    assert "torn  unread" in out
    with pytest.raises(UngatedTask, match="did not pass the gate 'incomplete': mean-only: reward 1"):
        admitted(tmp_path / "half")


def test_a_verifier_in_the_agents_box_is_staged_after_the_agent(tmp_path):
    """Accepted for tasks of others, and refused by lint for training. The agent's own /tests are gone by then."""
    how, _, _ = WEAK["shares the agent's box"]
    task = read_task(write(tmp_path / "stats", **how))
    with agent_box(task, task.solution) as box:
        assert box.run("bash /solution/solve.sh", 30).ok
        assert grade_in_place(task, box).reward == 1.0
    with agent_box(task, attacks.scripts(task)["reward-beforehand"]) as box:
        assert box.run("bash /solution/solve.sh", 30).ok
        assert grade_in_place(task, box).reward == 0.0


def test_an_attempt_sees_neither_tests_nor_another_agents_solution(tmp_path):
    task = read_task(write(tmp_path / "stats"))
    with agent_box(task) as box:
        assert box.run("ls /tests /solution /grader", 30).code != 0
        found = str(box.run("find / -xdev -not -path '/usr/*' -not -path '/proc/*' -name '*solve*'", 30).out)
        assert found.strip() == ""


def test_artifacts_beside_the_work_folder_reach_driver_and_candidate(tmp_path):
    solution = "echo out > /out/x; echo note > /logs/artifacts/note; ln -s /etc/passwd /out/link\n"
    verify = """
import sys
sys.path.insert(0, "/grader")
import grader
def verify():
    seen = grader.output(["/bin/sh", "-c", "cat /out/* /logs/artifacts/*; ls /logs /tests /grader 2>&1; true"])
    if grader.read("/out/x") + grader.read("/logs/artifacts/note") != b"out\\nnote\\n":
        raise grader.Failed("the driver does not have them")
    raise grader.Failed(seen.decode())
grader.main(verify)
"""
    folder = write(tmp_path / "task", verify, solution=solution, artifacts='"/out", "/logs/artifacts"')
    task = read_task(folder)
    found, done = scripted(task, task.solution)
    assert done.ok and found.refused == (("/out/link", "a link"),)
    said = grade(task, found).said
    assert said.startswith("not collected: /out/link: a link\nfailed: out\nnote\n")
    assert "/logs:\nartifacts\n" in said and "'/tests'" in said and "'/grader'" in said  # no such folders


SERVICE = """
import sys
sys.path.insert(0, "/grader")
import grader
def handle(request):
    if isinstance(request, list):
        return sum(request.count(one) for one in request)
    return {"doubled": 2 * request, "padding": "x" * 1000}
def verify():
    grader.serve([grader.PYTHON, "-I", "-S", "/app/stats.py"], handle, timeout=2.0)
grader.main(verify)
"""


@pytest.mark.parametrize(
    ("candidate", "said"),
    [
        ("print(1, flush=True); assert '\"doubled\": 2' in input()", ""),
        ("while True: print(1, flush=True)", "failed: it does not read its answers"),
        ("import time; time.sleep(1000)", "failed: /"),  # took more than 2 s
        ("print(list(range(150_000)), flush=True); input()", "failed: what it wrote took more than "),  # its square
        ("print('x' * (9 << 20), flush=True); input()", "failed: a request of more than"),
        ("print('{', flush=True); input()", "failed: no JSON"),
        ("print(1, end='', flush=True)", ""),  # half a request is none
    ],
)
def test_a_service_answers_and_a_candidate_that_abuses_it_fails(tmp_path, candidate: str, said: str):
    task = read_task(write(tmp_path / "task", SERVICE, solution=f"cat > /app/stats.py <<'PY'\n{candidate}\nPY\n"))
    verdict = grade(task, scripted(task, task.solution)[0])
    assert verdict.said.startswith(said) and (verdict.reward == 0.0) == bool(said), verdict


@pytest.mark.parametrize(
    "answer", ['"\\ud800"', "[" + ("[" * 40 + "]" * 40 + ",") * 100_000 + "0]"], ids=["half a character", "many values"]
)
def test_an_answer_that_is_hard_to_print_or_hold_fails_the_candidate_and_not_the_verifier(tmp_path, answer: str):
    verify = """
import sys
sys.path.insert(0, "/grader")
import grader
def verify():
    raise grader.Failed(f"it says {grader.parse(grader.read('/app/stats.py', 8 << 20))}")
grader.main(verify)
"""
    task = read_task(write(tmp_path / "task", verify))
    verdict = grade(task, Collected({"/app/stats.py": File(answer.encode())}, ()))
    assert verdict.reward == 0.0, verdict.error


def test_a_candidate_reads_neither_the_seed_nor_the_open_files_of_its_box(tmp_path):
    verify = """
import os, sys
sys.path.insert(0, "/grader")
import grader
def verify():
    look = "cat /proc/*/environ | tr '\\\\0' '\\\\n'; for p in /proc/[0-9]*; do readlink $p/fd/*; done"
    raise grader.Failed(f"{os.environ['GRADER_SEED']}: {grader.run(['/bin/sh', '-c', look]).out}")
grader.main(verify)
"""
    task = read_task(write(tmp_path / "task", verify))
    said = grade(task, Collected({}, ()), seed=123454321).said
    assert said.startswith("failed: 123454321: ") and "TERM=dumb" in said
    assert "GRADER_SEED" not in said and "/tests" not in said and "/grader" not in said, said


def test_a_seed_is_too_long_to_be_tried_out_from_the_inputs_it_drew(tmp_path):
    verify = "import sys\nsys.path.insert(0, '/grader')\nimport grader\ndef verify():\n    "
    verify += "raise grader.Failed(grader.seed())\ngrader.main(verify)\n"
    said = grade(read_task(write(tmp_path / "task", verify)), Collected({}, ())).said
    assert int(said.removeprefix("failed: ")) > 1 << 64


def test_memory_that_no_process_shows_costs_the_candidate_its_box_and_not_the_verdict(tmp_path):
    hog = """
import os
with open("/proc/self/oom_score_adj", "w") as file:
    file.write("0")
fd = os.memfd_create("hidden")
while True:
    os.write(fd, bytes(1 << 20))
"""
    task = read_task(write(tmp_path / "task"))
    verdict = grade(task, Collected({"/app/stats.py": File(hog.encode())}, ()))
    assert verdict.reward == 0.0, verdict.error


def test_more_than_a_box_holds_is_no_solution_and_no_error_of_the_verifier(tmp_path):
    task = read_task(write(tmp_path / "task"))
    verdict = grade(task, Collected({"/app/stats.py": File(bytes(200 << 20))}, ()))
    assert verdict.reward == 0.0 and "1 artifacts of 200 MiB have no room" in verdict.said


def test_a_file_whose_name_is_no_text_is_told_in_a_text(tmp_path):
    task = read_task(write(tmp_path / "task"))
    said = grade(task, Collected({}, (("/app/\udcff", "a link"),))).said
    assert said.encode().startswith(b"not collected: /app/\\udcff: a link\n")


def test_a_candidates_box_that_does_not_start_is_an_error_and_no_reward(tmp_path):
    broken = "sys.modules['candidate'].SETTINGS['prefix'].append('--no-such-option')"
    verify = SERVICE.replace("def verify", f"{broken}\ndef verify")
    task = read_task(write(tmp_path / "task", verify))
    verdict = grade(task, scripted(task, task.solution)[0])
    assert verdict.reward is None and "a candidate's box did not start" in verdict.error


def test_a_grading_tells_its_metrics_and_what_it_said(tmp_path):
    task = read_task(write(tmp_path / "stats"))
    found, _ = scripted(task, task.partials["mean-only"])
    verdict = grade(task, found, seed=5)
    assert verdict.reward == 0.0 and not verdict.passed and "failed: median(" in verdict.said
    again = grade(task, found, seed=5)
    assert again.said == verdict.said and grade(task, found, seed=6).said != verdict.said
