"""A cut of GLM-5.2 (every kind of layer, the draft layer) compiled as a round for TPUs that are not there."""

from __future__ import annotations

import json

import jax
import pytest

from glm_jax.cli.main import main
from glm_jax.plan import cost

pytestmark = pytest.mark.compile

CONFIG = """
from glm_jax.config.strict import default_config
from glm_jax.host.config import RunConfig


def get_config():
    config = default_config(RunConfig)
    config.model.preset = "small"
    config.model.changes = {
        "num_nextn_predict_layers": 1,
        "dtype": "bfloat16",
        "remat": True,
        "num_hidden_layers": 5,
        "indexer_types": ("full", *("full", "shared") * 2),
        "mlp_layer_types": ("dense", *("sparse",) * 4),
    }
    config.mesh.stage, config.mesh.fsdp, config.mesh.expert = 2, 2, 2
    config.rollout.slots, config.rollout.window, config.rollout.ticks = 8, 64, 8
    config.rollout.queue, config.rollout.requests = 4, 4
    config.rollout.prefill_slots, config.rollout.prefill_chunk = 4, 8
    config.learn.rows, config.learn.length = 8, 64
    config.rl.steps, config.rl.batch = 1, 4
    config.rl.policy_lr.peak = config.rl.critic_lr.peak = 1e-5
    return config
"""


def test_a_cut_fits_a_small_slice_whose_experts_trade_tokens_and_whose_stages_pass_rows_within_their_axes(
    tmp_path, capsys, monkeypatch
):
    monkeypatch.delenv("JAX_DEFAULT_MATMUL_PRECISION")  # the tests', not the users'
    (tmp_path / "cut.py").write_text(CONFIG)
    flags = [f"--{name}={tmp_path / file}" for name, file in (("config", "cut.py"), ("json", "plan.json"))]
    assert main(["plan", *flags, "--topology=v5e:2x4", f"--picture={tmp_path / 'plan.png'}"]) == 0
    plan = json.loads((tmp_path / "plan.json").read_text())
    assert plan["fits"] and plan["devices"] == 8
    assert sum(plan["parts_gib"].values()) == pytest.approx(plan["hbm_gib_per_chip"])
    assert {cost.TICK, cost.PREFILL, cost.LEARN} <= set(plan["phases"])
    for name in (cost.TICK, cost.PREFILL, cost.LEARN):
        axes = {row["axes"] for row in plan["phases"][name]["collectives"] if row["kind"] == "all-to-all"}
        assert axes == {"expert"}, name
        assert plan["phases"][name]["flops"] > 0
    passed = [row["axes"] for row in plan["phases"][cost.LEARN]["collectives"] if row["kind"] == "collective-permute"]
    assert "stage" in passed
    assert "v5e:2x4, 8 devices (stage 2 × fsdp 2 × expert 2), the whole round: fits" in capsys.readouterr().out
    assert jax.default_backend() == "cpu"
