"""Task sets: the held-out part shares no question with training, whatever the source repeats."""

from __future__ import annotations

import codecs
import dataclasses
import json
import re
import subprocess
import sys
import time

import pytest

from glm_jax.data import gym
from glm_jax.data.errors import DataError
from glm_jax.data.gym import draw, load_gym
from glm_jax.data.jsonl import read_jsonl
from glm_jax.data.scoring import reasoning_gym_score
from glm_jax.data.tasks import FamilyConfig, TaskConfig, make_tasks, same_question

SPELL = FamilyConfig("spell_backward", 1.0, {"min_word_len": 3, "max_word_len": 6})
DEMO = TaskConfig(families=(SPELL,), train_size=4000, eval_size=512, template="{metadata[word]}>")


def test_held_out_questions_are_distinct_from_training_but_for_case_and_space():
    tasks = make_tasks(DEMO)
    assert (len(tasks.train), len(tasks.eval)) == (4000, 512)
    assert tasks.repeated > 0  # the generator did draw some words again
    keys = [same_question(task.question) for task in (*tasks.train, *tasks.eval)]
    assert len(set(keys)) == len(keys)
    task = tasks.eval[0]
    assert task.question == f"{task.entry['metadata']['word']}>"
    assert task.answer == task.question[:-1][::-1]


def test_a_task_set_depends_on_its_seed_and_on_nothing_else():
    small = dataclasses.replace(DEMO, train_size=50, eval_size=20)
    assert make_tasks(small) == make_tasks(small)
    other = make_tasks(dataclasses.replace(small, seed=1))
    assert {task.question for task in other.eval} != {task.question for task in make_tasks(small).eval}


def test_families_share_the_tasks_by_weight_in_both_parts():
    families = (dataclasses.replace(SPELL, weight=3.0), FamilyConfig("letter_counting", 1.0))
    tasks = make_tasks(TaskConfig(families=families, train_size=80, eval_size=20))
    for part, size in ((tasks.train, 80), (tasks.eval, 20)):
        assert sum(task.family == "spell_backward" for task in part) == size * 3 // 4
    assert len({task.family for task in tasks.train[:10]}) == 2  # mixed, not one family after the other


@pytest.mark.parametrize(
    ("family", "message"),
    [
        (FamilyConfig("spell_backwards"), "did you mean 'spell_backward'"),
        (FamilyConfig("spell_backward", 1.0, {"min_word_length": 3}), "did you mean 'min_word_len'?"),
        (FamilyConfig("spell_backward", 1.0, {"min_word_len": 6, "max_word_len": 3}), "refuses its settings"),
        (
            FamilyConfig("chain_sum", 1.0, {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}),
            "gave 200 distinct questions in",
        ),
    ],
)
def test_a_family_that_cannot_serve_is_a_clear_error(family: FamilyConfig, message: str):
    with pytest.raises(DataError, match=message.replace("?", r"\?")):
        make_tasks(dataclasses.replace(DEMO, families=(family,), train_size=300, template="{question}"))


def test_a_template_that_names_an_unknown_field_says_which_there_are():
    with pytest.raises(DataError, match="metadata.* of source_dataset, source_index, word"):
        make_tasks(dataclasses.replace(DEMO, train_size=10, eval_size=1, template="{metadata[wrd]}"))


def write(path, lines) -> str:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def own(path: str, **changes) -> TaskConfig:
    return TaskConfig(source="jsonl", path=path, reward="rewards:score", template="{question}=", **changes)


def test_a_users_file_is_split_without_repeating_a_question(tmp_path):
    lines = [{"question": f"{i % 30}+1", "answer": str(i % 30 + 1), "level": i} for i in range(40)]
    tasks = make_tasks(own(write(tmp_path / "mine.jsonl", lines), eval_size=10))
    assert (len(tasks.train), len(tasks.eval), tasks.repeated) == (20, 10, 10)
    assert not {task.question for task in tasks.train} & {task.question for task in tasks.eval}
    assert all(task.question.endswith("=") and task.entry["level"] < 30 for task in tasks.eval)
    assert all(task.id.endswith(f"mine.jsonl:{task.entry['level'] + 1}") for task in tasks.train)


def test_a_held_out_file_that_shares_a_question_is_refused(tmp_path):
    train = write(tmp_path / "train.jsonl", [{"question": f"What is {i}?"} for i in range(9)])
    good = write(tmp_path / "eval.jsonl", [{"question": f"what is {i}?"} for i in range(9, 14)])
    tasks = make_tasks(own(train, eval_path=good))
    assert (len(tasks.train), len(tasks.eval)) == (9, 5) and tasks.train[0].answer is None
    bad = write(tmp_path / "bad.jsonl", [{"question": "what  is 4?"}, {"question": "new"}])
    with pytest.raises(DataError, match="1 held-out questions are training questions too, the first 'what  is 4"):
        make_tasks(own(train, eval_path=bad))


def test_a_file_too_small_to_hold_anything_out_is_refused(tmp_path):
    path = write(tmp_path / "few.jsonl", [{"question": str(i)} for i in range(4)])
    with pytest.raises(DataError, match="4 distinct questions and eval_size is 4"):
        make_tasks(own(path, eval_size=4))


@pytest.mark.parametrize("family", ["acre", "list_functions"])
def test_a_family_that_makes_all_that_it_is_asked_for_is_asked_for_little(family):
    keep = lambda entry: len(entry["question"]) % 2 == 0  # so that it is asked for more
    entries = draw(family, {}, 7, 5, keep)
    assert len({index for index, _ in entries}) == 5 and all(keep(entry) for _, entry in entries)


def test_a_family_ends_where_it_gives_no_more():
    source = gym._Source("word_ladder", {}, 7, 15_000)  # it refuses more than 20,000
    assert source.entry(14_999) is not None and source.entry(15_000) is None


def test_the_composite_is_made_of_families_by_their_own_settings_and_scored_by_theirs():
    parts = ({"name": "spell_backward", "config": {"min_word_len": 3}}, {"name": "acre", "weight": 2.0})
    config = TaskConfig(families=(FamilyConfig("composite", 1.0, {"datasets": parts}),), train_size=8, eval_size=2)
    tasks = make_tasks(config)
    sources = {task.entry["metadata"]["source_dataset"] for task in tasks.train}
    assert sources == {"spell_backward", "acre"}
    assert all(reasoning_gym_score(task.answer, dataclasses.asdict(task)) == 1.0 for task in tasks.train)
    wrong = FamilyConfig("composite", 1.0, {"datasets": ({"name": "acre", "wieght": 2.0},)})
    with pytest.raises(DataError, match="'composite' refuses its settings.*wieght"):
        make_tasks(dataclasses.replace(config, families=(wrong,)))


def test_a_long_draw_says_what_it_waits_for(monkeypatch, caplog):
    monkeypatch.setattr(gym, "TELL_AFTER", 0.01)
    draw("spell_backward", {}, 7, 2, lambda entry: not time.sleep(0.05))
    assert "still drawing questions of reasoning-gym's family 'spell_backward': 0 of 2" in caplog.text


@pytest.mark.nightly
def test_every_family_gives_questions():
    load_gym()
    from reasoning_gym.factory import DATASETS

    for family in sorted(DATASETS):
        settings = {"datasets": [{"name": "acre"}, {"name": "spell_backward"}]} if family == gym.COMPOSITE else {}
        assert len(draw(family, settings, 123456, 28, lambda entry: True)) == 28, family


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_a_byte_order_mark_and_any_line_end_are_read_past(tmp_path, end):
    texts = [f"{i} \u00e9\u2028" for i in range(3)]
    lines = [json.dumps({"question": text}, ensure_ascii=False) for text in texts]
    (tmp_path / "mine.jsonl").write_bytes(codecs.BOM_UTF8 + end.join(lines).encode())
    assert [record.entry["question"] for record in read_jsonl(str(tmp_path / "mine.jsonl"))] == texts


def test_a_carriage_return_within_a_line_is_white_space(tmp_path):
    (tmp_path / "mine.jsonl").write_bytes(b'{"question":\r"1"}\n{"question": "2"}\r\n')
    assert [record.entry["question"] for record in read_jsonl(str(tmp_path / "mine.jsonl"))] == ["1", "2"]


@pytest.mark.parametrize(
    ("encoding", "what"), [("utf-16", "is UTF-16 by its first bytes"), ("latin-1", "is no UTF-8 (byte 14 is 0xe9)")]
)
def test_another_encoding_is_named(tmp_path, encoding, what):
    (tmp_path / "mine.jsonl").write_bytes('{"question": "\u00e9"}'.encode(encoding))
    with pytest.raises(DataError, match=re.escape(f"mine.jsonl {what}: save it as UTF-8")):
        read_jsonl(str(tmp_path / "mine.jsonl"))


def test_lines_that_are_no_task_are_named_together(tmp_path):
    path = tmp_path / "damaged.jsonl"
    path.write_text('{"question": "fine"}\n\n{"question": 3}\n[1]\n{"questi\n{"question": "a", "answer": 4}\n')
    with pytest.raises(DataError) as caught:
        make_tasks(own(str(path)))
    text = str(caught.value)
    assert "damaged.jsonl:3: 'question' is 3" in text
    assert "damaged.jsonl:4: a JSON list" in text
    assert "damaged.jsonl:5: no JSON" in text
    assert "damaged.jsonl:6: 'answer' is 4" in text


def test_a_missing_or_empty_file_and_an_id_used_twice_are_clear_errors(tmp_path):
    with pytest.raises(DataError, match="nowhere.jsonl cannot be read"):
        make_tasks(own(str(tmp_path / "nowhere.jsonl")))
    with pytest.raises(DataError, match="holds no task"):
        make_tasks(own(write(tmp_path / "empty.jsonl", [])))
    twice = write(tmp_path / "twice.jsonl", [{"question": str(i), "id": "same"} for i in range(5)])
    with pytest.raises(DataError, match="id 'same' is used by two tasks"):
        make_tasks(own(twice, eval_size=1))


def test_a_config_tells_what_does_not_go_together():
    assert DEMO.check() == []
    text = "\n".join(TaskConfig(source="jsonl", train_size=0).check())
    assert "train_size is 0" in text and "path is not set" in text and "answer_score" in text
    text = "\n".join(TaskConfig(families=(FamilyConfig(weight=0.0),), path="x", reward="score").check())
    assert "weight of 'spell_backward' is 0.0" in text and "source = 'jsonl' only" in text and "module:function" in text


def test_importing_tasks_imports_neither_jax_nor_reasoning_gym():
    code = "import sys, glm_jax.data.tasks, glm_jax.data.scoring; print({'jax', 'reasoning_gym'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
