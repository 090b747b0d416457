"""Progress: a bar for people, lines for logs."""

from __future__ import annotations

import io

from rich.console import Console

from glm_jax.report.progress import Progress


def run(console: Console, every: float) -> str:
    with Progress(total=4, label="round", every=every, console=console) as progress:
        for step in range(1, 5):
            progress.update(step, {"reward": step / 4})
        progress.say("done [not markup]")
    return console.file.getvalue()


def test_a_log_gets_plain_lines_for_the_first_and_last_step():
    lines = run(Console(file=io.StringIO(), width=60), every=1000.0).splitlines()
    assert lines == ["round 1/4  0 s  reward 0.25", "round 4/4  0 s  reward 1", "done [not markup]"]


def test_a_log_gets_every_step_that_comes_late_enough():
    assert len(run(Console(file=io.StringIO()), every=0.0).splitlines()) == 5


def test_a_terminal_gets_a_bar_with_the_latest_figures():
    text = run(Console(file=io.StringIO(), force_terminal=True, width=120), every=0.0)
    assert "4/4" in text and "reward 1" in text and "done [not markup]" in text and "\x1b[" in text
