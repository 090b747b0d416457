"""The architecture in a Hugging Face `config.json`, read and written."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from glm_jax.model import hf_rope, schedule
from glm_jax.model.config import ModelConfig, ModelConfigError
from glm_jax.model.json_values import JsonValues, show

_DTYPES = ("float32", "bfloat16", "float16")  # that a file may ask for
_FIELDS = tuple(f.name for f in dataclasses.fields(ModelConfig))
_NOT_WRITTEN = ("remat",)


def from_hf(raw: Mapping[str, Any], stored_dtype: Callable[[], str] | None = None) -> ModelConfig:
    """Reads the dictionary of a `config.json`, with the aliases and precedence that transformers gives its fields.

    `stored_dtype` gives the dtype of the tensors beside it, for a config that says "auto".
    """
    if (kind := raw.get("model_type", "glm_moe_dsa")) != "glm_moe_dsa":
        raise ModelConfigError(f"model_type is {kind!r}: only 'glm_moe_dsa' (GLM-5, 5.1, 5.2) is this architecture")
    if (act := raw.get("hidden_act", "silu")) != "silu":
        raise ModelConfigError(f"hidden_act is {act!r}: only 'silu' is supported")
    raw = dict(raw)
    for alias in ("num_local_experts", "num_experts"):
        raw["n_routed_experts"] = raw.get(alias) or raw.get("n_routed_experts", 256)
    problems: list[str] = []
    raw["rope_theta"], raw["yarn"] = hf_rope.read(JsonValues(raw, "", problems))
    raw["dtype"] = _dtype(JsonValues(raw, "", problems), stored_dtype)
    if problems:
        raise ModelConfigError("; ".join(problems))
    heads = raw.get("num_attention_heads", 64)
    if (kv_heads := raw.get("num_key_value_heads", 64)) != heads:
        raise ModelConfigError(f"num_key_value_heads={kv_heads} must equal num_attention_heads={heads}")
    layers = raw.get("num_hidden_layers", 78)
    raw["indexer_types"] = schedule.indexer_types(layers, raw)
    raw["mlp_layer_types"] = schedule.mlp_types(layers, raw)
    raw["num_nextn_predict_layers"] = raw.get("num_nextn_predict_layers") or 0
    raw["index_share_for_mtp_iteration"] = bool(raw.get("index_share_for_mtp_iteration"))
    return ModelConfig(**{k: raw[k] for k in _FIELDS if k in raw})


def _dtype(raw: JsonValues, stored_dtype: Callable[[], str] | None) -> str:
    """`dtype` or, in older files, `torch_dtype`: plain, after "torch.", or "auto"; float32 where neither is given."""
    auto = ("auto",) if stored_dtype else ()
    spelt = (*_DTYPES, *(f"torch.{name}" for name in _DTYPES), *auto)
    given = [raw.one_of(key, spelt, None, null=True) for key in ("dtype", "torch_dtype")]
    named = {name.removeprefix("torch.") for name in given if name is not None}
    if len(named) > 1:
        raw.wrong("torch_dtype", f"the same as dtype, {show(raw.values['dtype'])}, or absent")
    name = named.pop() if named else "float32"
    return stored_dtype() if name == "auto" else name


def to_hf(config: ModelConfig) -> dict[str, Any]:
    """The `config.json` of this model, as transformers reads it."""
    values = {k: getattr(config, k) for k in _FIELDS if k not in _NOT_WRITTEN}
    rope = hf_rope.write(values.pop("rope_theta"), values.pop("yarn"))
    return {
        "architectures": ["GlmMoeDsaForCausalLM"],
        "model_type": "glm_moe_dsa",
        **values,
        "initializer_range": config.initializer_range if config.initializer_range is not None else 0.02,
        "indexer_types": list(config.indexer_types),
        "mlp_layer_types": list(config.mlp_layer_types),
        "num_key_value_heads": config.num_attention_heads,
        "hidden_act": "silu",
        "rope_parameters": rope,
    }
