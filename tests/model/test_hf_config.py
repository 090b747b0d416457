"""Every key of a `config.json` with values that no model has: taken for what they are, or refused by file and key."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from glm_jax.io.hf import read_config
from glm_jax.model import hf_config
from glm_jax.model.config import ModelConfigError
from glm_jax.model.hf_config import from_hf
from glm_jax.model.yarn import Yarn

GOLDEN = json.loads((Path(__file__).parents[1] / "golden/yarn/config.json").read_text())
GOLDEN["rope_theta"] = GOLDEN["rope_parameters"].pop("rope_theta")  # read where the object has none
PLAIN = from_hf(GOLDEN)
FIELDS = [field.name for field in dataclasses.fields(PLAIN)]
VALUES = [-1, 0, 10**9, "abc", "", float("nan"), float("inf"), None, True, False, [], ["full"] * 6, [1], {}, 1.5]
YARN = ["rope_type", "rope_theta", *(field.name for field in dataclasses.fields(Yarn))]


def keys() -> list[str]:
    # Not written back, nor in the golden file: what stands beside or instead of other keys.
    written = hf_config.to_hf(dataclasses.replace(PLAIN, num_nextn_predict_layers=1))
    return sorted({*hf_config.READ, *written, *GOLDEN})


@pytest.mark.parametrize("key", keys())
def test_every_value_of_a_key_is_taken_for_what_it_is_or_refused_by_file_and_key(key):
    absent = {k: v for k, v in GOLDEN.items() if k != key}
    for value in VALUES:
        try:
            config = from_hf({**GOLDEN, key: value}, "a/config.json")
        except ModelConfigError as error:
            assert str(error).startswith(("1 problem in a/config.json:", "a/config.json: model_type")), value
            assert key in str(error), value
            continue
        hash(config)
        if value is None or value in ([], {}):
            assert config == from_hf(absent), f"{key}={value} is as if absent"
        elif key in FIELDS:
            got = getattr(config, key)
            assert got == (tuple(value) if isinstance(value, list) else value), value
            assert type(got) in (type(getattr(PLAIN, key)), tuple), value
        else:
            allowed = {"num_experts": "n_routed_experts", "num_local_experts": "n_routed_experts"}
            changed = [name for name in FIELDS if getattr(config, name) != getattr(PLAIN, name)]
            assert changed in ([], [allowed.get(key)]), value


@pytest.mark.parametrize("key", YARN)
def test_every_value_within_rope_parameters_likewise(key):
    for value in VALUES:
        rope = {**GOLDEN["rope_parameters"], key: value}
        try:
            config = from_hf({**GOLDEN, "rope_parameters": rope})
        except ModelConfigError as error:
            assert f"rope_parameters.{key}" in str(error) or f"{key}=" in str(error), value
            continue
        if value is None:
            del rope[key]
            assert config == from_hf({**GOLDEN, "rope_parameters": rope}), f"{key} null is as if absent"
        else:
            got = config.rope_theta if key == "rope_theta" else getattr(config.yarn, key)
            assert got == value and type(got) in (bool, int, float), value


def test_all_that_is_wrong_is_told_at_once_with_the_file(tmp_path):
    wrong = {"vocab_size": "abc", "index_topk": -1, "rms_norm_eps": None, "sliding_window": 4096, "index_top_k": 3}
    (tmp_path / "config.json").write_text(json.dumps({**GOLDEN, **wrong, "dtype": "int8"}))
    with pytest.raises(ModelConfigError) as error:
        read_config(tmp_path)
    lines = str(error.value).splitlines()
    assert lines[0] == f"6 problems in {tmp_path / 'config.json'}:"
    assert sorted(line.removeprefix("  - ") for line in lines[1:]) == [
        "dtype is 'int8' (str); it has to be one of 'float32', 'bfloat16', 'float16', 'torch.float32', "
        "'torch.bfloat16', 'torch.float16', 'auto'",
        "index_top_k is no known key; did you mean index_topk?",
        "index_topk is -1 (int); it has to be a whole number from 1 to 2147483647",
        "rms_norm_eps is null; it has to be a number from 1e-12 to 0.1",
        "sliding_window is 4096 (int); it has to be absent: it is not computed here",
        "vocab_size is 'abc' (str); it has to be a whole number from 1 to 16777216",
    ]


@pytest.mark.parametrize(
    "change, told",
    [
        (dict(scoring_func="softmax"), "scoring_func is 'softmax' .*; it has to be 'sigmoid'"),
        (dict(topk_method="greedy"), "topk_method is 'greedy'"),
        (dict(indexer_rope_interleave=False), "indexer_rope_interleave is false; it has to be true"),
        (dict(mlp_bias=True), "mlp_bias is true; it has to be false"),
        (dict(attention_dropout=0.1), "attention_dropout is 0.1"),
        (dict(use_qk_norm=True), "use_qk_norm is true; it has to be absent"),
        (dict(logits_scaling=8.0), "logits_scaling is 8.0"),
        (dict(quantization_config={"weight_block_size": [64, 64]}), r"weight_block_size is \[64, 64\] .*\[128, 128\]"),
    ],
)
def test_what_would_be_computed_otherwise_elsewhere_is_refused(change, told):
    with pytest.raises(ModelConfigError, match=told):
        from_hf({**GOLDEN, **change})


def test_what_the_releases_say_beside_is_passed_over():
    beside = {
        "eos_token_id": [1, 2],
        "head_dim": 192,
        "torch_dtype": None,
        "index_topk_freq": None,
        "logits_scaling": 1.0,
        "sliding_window": None,
        "use_qk_norm": False,
        "quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]},
    }
    assert from_hf({**GOLDEN, **beside}) == PLAIN
