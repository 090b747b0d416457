"""Metrics on disk: whole lines, nothing lost or doubled by a kill and a resume, no NaN in disguise."""

from __future__ import annotations

import json

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from glm_jax.report.metrics import MetricsError, MetricsWriter, read_metrics


def events(workdir, tag: str) -> list[tuple[int, float]]:
    found = EventAccumulator(str(workdir / "tensorboard"))
    found.Reload()
    return [(event.step, event.value) for event in found.Scalars(tag)]


def test_each_step_is_one_json_line_and_one_tensorboard_event(tmp_path):
    with MetricsWriter(tmp_path) as writer:
        writer.write(1, {"rollout/reward": 0.25, "time/wall": 3})
        writer.write(2, {"rollout/reward": 0.5})
    assert read_metrics(tmp_path) == [
        {"step": 1, "rollout/reward": 0.25, "time/wall": 3.0},
        {"step": 2, "rollout/reward": 0.5},
    ]
    assert events(tmp_path, "rollout/reward") == [(1, 0.25), (2, 0.5)]
    assert all(json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines())


def test_a_line_is_on_disk_as_soon_as_it_is_written(tmp_path):
    writer = MetricsWriter(tmp_path)
    writer.write(1, {"a": 1.0})
    assert read_metrics(tmp_path) == [{"step": 1, "a": 1.0}]
    writer.close()
    writer.close()


def test_a_figure_that_is_not_finite_is_named_and_never_written_as_a_number(tmp_path):
    with MetricsWriter(tmp_path) as writer:
        assert writer.write(1, {"a": float("nan"), "b": 1.0, "c": float("inf")}) == ("a", "c")
    assert read_metrics(tmp_path) == [{"step": 1, "b": 1.0, "not_finite": ["a", "c"]}]


def test_a_value_that_is_no_number_is_refused(tmp_path):
    with MetricsWriter(tmp_path) as writer, pytest.raises(MetricsError, match="metric 'a' is 'x' .str."):
        writer.write(1, {"a": "x"})


def test_a_resume_keeps_its_step_and_cuts_what_lies_beyond(tmp_path):
    with MetricsWriter(tmp_path) as writer:
        for step in range(1, 6):
            writer.write(step, {"a": float(step)})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "a": 6')  # a kill in mid-write
    assert [line["step"] for line in read_metrics(tmp_path)] == [1, 2, 3, 4, 5]
    with MetricsWriter(tmp_path, resume_step=3) as writer:
        writer.write(4, {"a": 40.0})
    assert [(line["step"], line["a"]) for line in read_metrics(tmp_path)] == [(1, 1), (2, 2), (3, 3), (4, 40)]
    assert events(tmp_path, "a") == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 40.0)]


def test_a_run_that_starts_anew_leaves_nothing_of_an_earlier_one(tmp_path):
    with MetricsWriter(tmp_path) as writer:
        writer.write(7, {"a": 1.0})
    with MetricsWriter(tmp_path) as writer:
        writer.write(1, {"a": 2.0})
    assert read_metrics(tmp_path) == [{"step": 1, "a": 2.0}]
    assert events(tmp_path, "a") == [(1, 2.0)]


def test_a_missing_or_damaged_file_is_a_clear_error(tmp_path):
    with pytest.raises(MetricsError, match="metrics.jsonl does not exist"):
        read_metrics(tmp_path)
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\nnonsense\n{"step": 2}\n')
    with pytest.raises(MetricsError, match="metrics.jsonl:2 is no line of metrics: 'nonsense'"):
        read_metrics(tmp_path)
