"""Reading and writing `config.json`: aliases, precedence, and what is refused."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from glm_jax.model.config import PRESETS, ModelConfig, ModelConfigError
from glm_jax.model.hf_config import from_hf, to_hf
from tests.model.tiny import tiny_config

GOLDEN = json.loads((Path(__file__).parents[1] / "golden/tiny/config.json").read_text())


def test_defaults_are_those_of_the_public_implementation():
    config = from_hf({})
    assert (config.hidden_size, config.n_routed_experts, config.num_experts_per_tok) == (6144, 256, 8)
    assert config.rope_theta == 10000.0 and config.rms_norm_eps == 1e-5 and config.latent_norm_eps == 1e-6
    assert config.mlp_layer_types[:4] == ("dense", "dense", "dense", "sparse")
    assert set(config.indexer_types) == {"full"}


def test_a_written_config_is_read_back_as_it_was():
    for config in (
        tiny_config(n_group=2, topk_group=1, attention_bias=True, rope_theta=123.0),
        PRESETS["glm52_744b"](),
    ):
        again = from_hf(json.loads(json.dumps(to_hf(config))))
        assert dataclasses.replace(again, initializer_range=config.initializer_range) == config


def test_the_epsilon_of_the_latent_norms_survives_being_written():
    assert from_hf(to_hf(tiny_config(latent_norm_eps=1e-5))).latent_norm_eps == 1e-5


def test_aliases_and_precedence():
    assert from_hf({**GOLDEN, "num_local_experts": 16}).n_routed_experts == 16
    assert from_hf({**GOLDEN, "num_local_experts": 16, "num_experts": 32}).n_routed_experts == 32
    bare = {k: v for k, v in GOLDEN.items() if k != "rope_parameters"}
    assert from_hf({**bare, "rope_theta": 5.0}).rope_theta == 5.0
    assert from_hf({**GOLDEN, "rope_theta": 5.0}).rope_theta == 8e6
    assert from_hf({**bare, "rope_parameters": None}).rope_theta == 1e4
    assert from_hf({**GOLDEN, "torch_dtype": "bfloat16", "dtype": None}).dtype == "bfloat16"


@pytest.mark.parametrize("name", ["bfloat16", "torch.bfloat16", "auto"])
@pytest.mark.parametrize("keys", [("dtype",), ("torch_dtype",), ("dtype", "torch_dtype")])
def test_every_spelling_of_a_dtype_is_read(name, keys):
    bare = {k: v for k, v in GOLDEN.items() if k != "dtype"}
    config = from_hf({**bare, **dict.fromkeys(keys, name)}, stored_dtype=lambda: "bfloat16")
    assert config.dtype == "bfloat16"
    assert from_hf({**bare, "dtype": name, "torch_dtype": None}, stored_dtype=lambda: "bfloat16").dtype == "bfloat16"
    assert from_hf(bare).dtype == "float32"


@pytest.mark.parametrize(
    "change, told",
    [
        (dict(dtype="int8"), "dtype is 'int8' .*; it has to be one of 'float32', 'bfloat16', 'float16'"),
        (dict(dtype=None, torch_dtype=16), "torch_dtype is 16"),
        (dict(dtype="float16", torch_dtype="bfloat16"), "torch_dtype is 'bfloat16' .* the same as dtype, 'float16'"),
        (dict(dtype="auto"), "dtype is 'auto'"),  # no tensors are there to ask
    ],
)
def test_another_dtype_is_refused_by_its_key(change, told):
    with pytest.raises(ModelConfigError, match=told):
        from_hf({**GOLDEN, **change})


def test_a_dtype_asked_for_in_python_is_one_that_runs():
    with pytest.raises(ModelConfigError, match="dtype='torch.bfloat16' must be one of float32, bfloat16"):
        tiny_config(dtype="torch.bfloat16")


@pytest.mark.parametrize(
    "change, told",
    [
        (dict(model_type="deepseek_v3"), "model_type is 'deepseek_v3'"),
        (dict(num_key_value_heads=2), "num_key_value_heads=2 must equal num_attention_heads=4"),
        (dict(rope_parameters=dict(rope_type="linear", rope_theta=1e4)), "'linear'"),
        (dict(num_experts_per_tok=9), "num_experts_per_tok=9 exceeds n_routed_experts=8"),
        (dict(n_group=3), "n_group=3 must divide"),
        (dict(n_group=2, topk_group=3), "at least topk_group=3"),
        (dict(n_group=8), "n_group=8 leaves 1 expert"),
        (dict(n_group=4, topk_group=1, num_experts_per_tok=3), "num_experts_per_tok=3 exceeds the 2 experts"),
        (dict(qk_rope_head_dim=7), "must be even"),
        (dict(qk_rope_head_dim=32), "at most index_head_dim=16"),
        (dict(hidden_act="gelu"), "hidden_act is 'gelu'"),
    ],
)
def test_a_config_of_another_architecture_or_that_cannot_run_is_refused(change, told):
    with pytest.raises(ModelConfigError, match=told):
        from_hf({**GOLDEN, **change})


def test_all_reasons_are_told_at_once():
    with pytest.raises(ModelConfigError, match="exceeds n_routed_experts.*must be even"):
        tiny_config(num_experts_per_tok=5, qk_rope_head_dim=3)


def test_a_size_below_one_is_refused():
    with pytest.raises(ModelConfigError, match="n_group=0 must be at least 1; index_topk=-1 must be at least 1"):
        tiny_config(n_group=0, index_topk=-1)


def test_a_config_is_hashable_and_compares_by_value():
    assert len({tiny_config(), tiny_config(), tiny_config(index_topk=5)}) == 2
    assert isinstance(PRESETS["small"](index_topk=4), ModelConfig)
