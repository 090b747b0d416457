"""The bench of checkpoints measures what it says, and leaves nothing behind."""

from __future__ import annotations

import json

import numpy as np
import pytest

from glm_jax.bench import checkpoint
from glm_jax.io.checkpoints import Checkpoints


def test_it_tells_every_part_and_cleans_up(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "LEAF", 1 << 18)
    monkeypatch.setattr(checkpoint, "SMOKE", 1)
    report = tmp_path / "found.json"
    (tmp_path / "disk").mkdir()
    table = checkpoint.run(2, 1024, tmp_path / "disk", report, smoke=True)
    figures = json.loads(report.read_text())
    assert figures["bytes"] == 1 << 20 and len(figures["all"]) == 2
    for name, seconds in figures["seconds"].items():
        assert seconds > 0 and f"| {name} | {seconds:.3f} |" in table
    assert len(figures["seconds"]) == 5 and not list((tmp_path / "disk").iterdir())
    assert all(one[checkpoint.HELD] <= one[checkpoint.SAVE] for one in figures["all"])


def test_other_bytes_are_an_error(tmp_path, monkeypatch):
    restore = Checkpoints.restore
    turned = lambda self, *args: ({k: -x for k, x in restore(self, *args)[0].items()}, None)
    monkeypatch.setattr(Checkpoints, "restore", turned)
    with pytest.raises(ValueError, match="other bytes"):
        checkpoint.measure({"w": np.ones(8, np.float32)}, tmp_path)
