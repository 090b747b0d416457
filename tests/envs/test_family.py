"""Families: instances are functions of the gated folder and a number, and blanks are laid out or refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from glm_jax.envs.gates import record
from glm_jax.envs.tasks import family
from glm_jax.envs.tasks.harbor import read_task
from glm_jax.envs.tasks.task import TaskError

FAMILY = Path(__file__).resolve().parents[2] / "experiments" / "families" / "copy-word"


def test_an_instance_has_no_blank_left_and_is_the_same_whenever_it_is_made():
    task = read_task(FAMILY)
    one, again, other = (family.instance(task, index) for index in (7, 7, 8))
    assert one == again and one.instruction != other.instruction
    assert "{{" not in repr(one)
    (path,) = one.start
    assert path.removeprefix("/app/") in one.instruction.split()
    assert one.start[path].data == one.tests["want"].data and len(one.tests["want"].data) in (2, 3)
    assert one.partials.keys() == task.partials.keys()


def test_the_values_of_an_instance_differ_from_each_other():
    task = read_task(FAMILY)
    for index in range(200):
        words = family.instance(task, index).instruction.split()
        assert words[8] != words[-1].rstrip(".")


def test_the_gates_run_on_instances_that_the_content_draws():
    task = read_task(FAMILY)
    names = [name for name, _ in family.gated(task, "bundle a")]
    assert len(set(names)) == family.GATED and names == [name for name, _ in family.gated(task, "bundle a")]
    assert names != [name for name, _ in family.gated(task, "bundle b")]
    plain = read_task(FAMILY.parents[1] / "tasks" / "intervals")
    assert not family.is_family(plain) and list(family.gated(plain, "x")) == [("", plain)]


def test_the_family_that_ships_is_admitted_and_a_changed_one_is_not(tmp_path):
    assert record.admitted(FAMILY).name == "glm-jax/copy-word"
    gates = {gate["name"]: gate["trials"] for gate in json.loads((FAMILY / "gates.json").read_text())["gates"]}
    assert len({trial.partition(":")[0] for trial in gates["attacks"]}) == family.GATED
    shutil.copytree(FAMILY, tmp_path / "copy")
    (tmp_path / "copy" / "tests" / "want").write_text("{{word}}\n")
    with pytest.raises(record.UngatedTask, match="was changed after it went through the gates"):
        record.admitted(tmp_path / "copy")


@pytest.mark.parametrize(
    "blank", ['"abc"', '{alphabet = "a b", length = [1, 2]}', '{alphabet = "ab", length = [2, 1]}']
)
def test_a_blank_that_cannot_be_filled_is_named(tmp_path, blank):
    shutil.copytree(FAMILY, tmp_path / "copy")
    path = tmp_path / "copy" / "task.toml"
    path.write_text(
        "\n".join(f"word = {blank}" if line.startswith("word =") else line for line in path.read_text().split("\n"))
    )
    with pytest.raises(TaskError, match=r"metadata.glm_jax.family.word is .* it looks like"):
        family.instance(read_task(tmp_path / "copy"), 0)


def test_blanks_that_cannot_differ_are_named(tmp_path):
    shutil.copytree(FAMILY, tmp_path / "copy")
    path = tmp_path / "copy" / "task.toml"
    path.write_text(path.read_text().replace('"abcdefgh", length = [1, 2]', '"a", length = [1, 1]'))
    with pytest.raises(TaskError, match="blank 'to' finds no value that differs from {'from': 'a'}"):
        family.instance(read_task(tmp_path / "copy"), 0)
