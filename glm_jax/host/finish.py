"""What a finished run leaves in its workdir: the policy as a model folder, its curves, three rollouts in text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from glm_jax.data.file_tokenizer import carry_over
from glm_jax.data.tokenizer import tokenizer_of
from glm_jax.io import hf
from glm_jax.model.config import ModelConfig
from glm_jax.report.metrics import read_metrics
from glm_jax.report.plots import Sample, describe, run_picture

EXPORT, PICTURE, SAMPLES = "policy", "run.png", "samples.txt"
STEP = "finished"  # holds the step after which all of these were written


def finish(
    workdir: Path,
    step: int,
    model: ModelConfig,
    params: Any,
    samples: Sequence[Sample],
    say: Callable[[str], None],
    source: Path | None = None,
    writes: bool = True,
) -> None:
    """Writes them, and then that it was after `step`: a run may be made longer later.

    source: the model folder that the run started from, whose tokenizer goes along. Of several processes, which all call
    this, one `writes`.
    """
    text = "\n\n".join(describe(sample) for sample in samples)
    if writes:
        (workdir / SAMPLES).write_text(text + "\n")
        run_picture(read_metrics(workdir), samples, workdir / PICTURE)
        carry_over(source, workdir / EXPORT, tokenizer_of(source).stop_ids)
        (workdir / STEP).unlink(missing_ok=True)
    hf.save(workdir / EXPORT, model, params)
    if writes:
        (workdir / STEP).write_text(f"{step}\n")
    say(f"{text}\n\npolicy: {workdir / EXPORT}   curves: {workdir / PICTURE}")


def exported_step(workdir: Path) -> int | None:
    """The step whose results the workdir holds whole; None where there are none."""
    file = workdir / STEP
    text = file.read_text().strip() if file.is_file() and (workdir / EXPORT / "config.json").is_file() else ""
    return int(text) if text.isdigit() else None
