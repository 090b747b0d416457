"""The environments of a run: only what passed its gates, dealt into training and held-out tasks."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from glm_jax.data.errors import DataError
from glm_jax.data.tasks import TaskConfig
from glm_jax.data.tokenizer import ByteTokenizer
from glm_jax.envs.gates.record import UngatedTask
from glm_jax.envs.pool import Answer, PoolError
from glm_jax.host import calls, playground
from glm_jax.host.environments import ToolConfig

EXPERIMENTS = Path(__file__).resolve().parents[2] / "experiments"
FAMILY = EXPERIMENTS / "families" / "copy-word"
CONFIG = TaskConfig(source="environments", environments=(str(FAMILY),), train_size=30, eval_size=10)


def test_a_family_gives_as_many_different_tasks_as_are_wanted():
    tasks = playground.make_tasks(CONFIG)
    assert (len(tasks.train), len(tasks.eval)) == (30, 10)
    assert len({task.question for task in (*tasks.train, *tasks.eval)}) == 40
    assert tasks == playground.make_tasks(CONFIG) and tasks != playground.make_tasks(replace(CONFIG, seed=1))
    places = playground.places(tasks.train)
    assert {place.bundle for place in places.values()} == {tasks.train[0].entry["bundle"]}
    assert len({place.index for place in places.values()}) == 30


def test_tasks_alone_and_families_share_the_sizes():
    folders = tuple(str(EXPERIMENTS / "tasks" / name) for name in ("intervals", "ttl-cache"))
    tasks = playground.make_tasks(replace(CONFIG, environments=(*folders, str(FAMILY)), train_size=12, eval_size=1))
    families = [task.family for task in (*tasks.train, *tasks.eval)]
    assert families.count("intervals") == families.count("ttl-cache") == 1 and families.count("copy-word") == 4
    with pytest.raises(DataError, match="give 2 different questions and eval_size is 2"):
        playground.make_tasks(replace(CONFIG, environments=folders, eval_size=2))


@pytest.mark.parametrize("change", ["no record", "changed"])
def test_a_task_that_did_not_pass_its_gates_as_it_stands_is_refused_with_the_remedy(tmp_path, change):
    folder = tmp_path / "copy"
    shutil.copytree(FAMILY, folder)
    (folder / "gates.json").unlink() if change == "no record" else (folder / "tests" / "test.sh").write_text("echo\n")
    with pytest.raises(UngatedTask, match=f"glm-jax envs check {folder}"):
        playground.make_tasks(replace(CONFIG, environments=(str(folder),)))


class Played:
    """A pool whose oracles play as told."""

    def __init__(self, value: dict):
        self.value, self.asked = value, []

    def ask(self, key, arguments, limit):
        self.asked.append((key, arguments))

    def wait(self, timeout):
        return True

    def take(self):
        return [(key, Answer(self.value)) for key, _ in self.asked]


def test_a_transcript_is_to_be_learnt_where_the_oracle_speaks_and_only_there():
    tokenizer, tools = ByteTokenizer(), ToolConfig(transcripts=3)
    tasks = playground.make_tasks(CONFIG).train
    turns = [["read_file", '{"path": "a"}', "rst"], ["submit", "{}", "submitted"]]
    pool = Played({"reward": 1.0, "turns": turns})
    found = playground.examples(tasks, pool, tokenizer, tools, 200, 5.0)
    assert len(found) == 3 and len({arguments[1] for _, arguments in pool.asked}) == 3
    one = found[0]
    assert tokenizer.decode(one.prompt) == tasks[0].question
    read, seen = calls.write("read_file", {"path": "a"}, tokenizer), calls.response("rst", tokenizer, 99)
    assert one.answer.tolist() == [*read, *seen, *calls.write("submit", {}, tokenizer)]
    assert one.answer[~one.own].tolist() == seen
    with pytest.raises(DataError, match="more than the window of 60"):
        playground.examples(tasks, pool, tokenizer, tools, 60, 5.0)


@pytest.mark.parametrize("value", [{"reward": 0.0, "why": "no such file", "turns": []}, {"failed": "box gone"}])
def test_an_oracle_whose_turns_are_not_rewarded_is_an_error(value):
    with pytest.raises(PoolError, match="the oracle's turns are not rewarded: (no such file|box gone)"):
        tasks = playground.make_tasks(CONFIG).train
        playground.examples(tasks, Played(value), ByteTokenizer(), ToolConfig(transcripts=1), 200, 5.0)
