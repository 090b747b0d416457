"""What `glm-jax eval` prints and writes."""

from __future__ import annotations

import pytest

from glm_jax.cli.eval import as_json, run, table
from glm_jax.cli.flags import UsageError
from glm_jax.host.measure import Measured
from glm_jax.host.passk import Estimate

FOUND = Measured(
    "runs/demo at step 9", 512, 4, {1: Estimate(0.5, 0.4, 0.6), 4: Estimate(0.75, 0.7, 0.8)}, {"eval/invalid": 2.0}
)


def test_the_table_names_the_source_and_every_k_with_its_interval():
    text = table(FOUND)
    assert text.splitlines()[0] == "runs/demo at step 9: 512 held-out questions, 4 sample(s) each"
    assert "pass@1      0.5000   0.4000 to 0.6000" in text and "pass@4      0.7500   0.7000 to 0.8000" in text
    assert "invalid          2.0000" in text


def test_the_json_holds_the_same_figures():
    found = as_json(FOUND)
    assert found["pass@4"] == {"value": 0.75, "low": 0.7, "high": 0.8} and found["questions"] == 512


@pytest.mark.parametrize("flags", [[], ["--workdir=a", "--model=b"]])
def test_exactly_one_source_of_weights_is_wanted(tmp_path, flags):
    (tmp_path / "config.py").write_text("import ml_collections\nget_config = lambda: ml_collections.ConfigDict()\n")
    with pytest.raises(UsageError, match="one of --workdir .* and --model"):
        run([f"--config={tmp_path / 'config.py'}", *flags])
