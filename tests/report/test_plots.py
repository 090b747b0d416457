"""The picture of a run."""

from __future__ import annotations

import subprocess
import sys

import pytest
from matplotlib.image import imread

from glm_jax.report.plots import LINES, WIDTH, Sample, curve, describe, run_picture

METRICS = [
    {"step": step, "rollout/reward": step / 50, "rollout/logprob_gap_mean": 1e-7, "critic/explained_variance": 0.3}
    for step in range(1, 41)
] + [{"step": 40, "eval/exact_match": 0.7}]


@pytest.mark.parametrize("samples", [[], [Sample("abc>", "$cb\x1b[2J^{", "cba", 0.25)] * 5])
def test_a_picture_is_drawn_whatever_the_policy_said(tmp_path, samples):
    run_picture(METRICS, samples, tmp_path / "run.png")
    image = imread(tmp_path / "run.png")
    assert image.shape[1] > 1000 and image[..., :3].std() > 0.02  # not blank
    run_picture([], [], tmp_path / "empty.png")


def test_a_curve_holds_the_steps_at_which_the_metric_was_logged():
    assert curve(METRICS, "eval/exact_match") == ([40], [0.7])
    assert len(curve(METRICS, "rollout/reward")[0]) == 40
    assert curve(METRICS, "never") == ([], [])


def test_a_sample_is_short_and_safe_to_print():
    text = describe(Sample("long " * 100, "\x1b[2J\n", None, None))
    lines = text.split("\n")
    assert lines[0] == "reward invalid" and len(lines) <= LINES and max(map(len, lines)) <= WIDTH
    assert "said: \\x1b[2J\\n" in describe(Sample("q", "\x1b[2J\n", "a", 0.5))


def test_matplotlib_is_imported_only_to_draw():
    code = "import sys, glm_jax.report.plots; print('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "False"
