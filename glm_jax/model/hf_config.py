"""The architecture in a Hugging Face `config.json`, read and written."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from glm_jax.model import hf_rope, schedule
from glm_jax.model.config import ModelConfig, ModelConfigError
from glm_jax.model.json_values import JsonValues, show
from glm_jax.model.quantised import BLOCK

_DTYPES = ("float32", "bfloat16", "float16")  # that a file may ask for
_SIZE, _LAYERS, _EXPERTS, _INT32 = 1 << 24, 1 << 10, 1 << 16, (1 << 31) - 1
_WHOLE = {  # least and most
    "vocab_size": (1, _SIZE),
    "hidden_size": (1, _SIZE),
    "intermediate_size": (1, _SIZE),
    "moe_intermediate_size": (1, _SIZE),
    "num_hidden_layers": (1, _LAYERS),
    "num_attention_heads": (1, _SIZE),
    "n_shared_experts": (1, _EXPERTS),
    "num_experts_per_tok": (1, _EXPERTS),
    "n_group": (1, _EXPERTS),
    "topk_group": (1, _EXPERTS),
    "q_lora_rank": (1, _SIZE),
    "kv_lora_rank": (1, _SIZE),
    "qk_nope_head_dim": (1, _SIZE),
    "qk_rope_head_dim": (2, _SIZE),
    "v_head_dim": (1, _SIZE),
    "index_topk": (1, _INT32),  # beyond a text's length: all of it
    "index_head_dim": (1, _SIZE),
    "index_n_heads": (1, _SIZE),
}
_EPS = (1e-12, 0.1)
_NUMBERS = {
    "routed_scaling_factor": (1e-6, 1e6),
    "rms_norm_eps": _EPS,
    "latent_norm_eps": _EPS,
    "initializer_range": (0, 10),
}
_FLAGS = ("norm_topk_prob", "attention_bias", "tie_word_embeddings")
_EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")  # the first that is given counts
_SCHEDULE = {  # whole numbers that lists of words overrule; null: as if absent
    "index_topk_freq": (0, _LAYERS),
    "index_skip_topk_offset": (0, _LAYERS),
    "first_k_dense_replace": (0, _LAYERS),
}
_FIXED = {  # what else is said is not computed here, nor by transformers, which passes over most of these
    "hidden_act": "silu",
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "moe_layer_freq": 1,
    "rope_interleave": True,
    "indexer_rope_interleave": True,
    "mlp_bias": False,
}
_FOREIGN = {  # of other architectures, and the value at which they change nothing; so do null and false
    "sliding_window": 0,
    "attention_chunk_size": 0,
    "attn_logit_softcapping": 0,
    "final_logit_softcapping": 0,
    "swiglu_limit": 0,
    "use_qk_norm": 0,
    "embedding_multiplier": 1,
    "attention_multiplier": 1,
    "residual_multiplier": 1,
    "logits_scaling": 1,
    "logit_scale": 1,
    "partial_rotary_factor": 1,
}
_OTHERS = (
    "model_type",
    "num_key_value_heads",
    "attention_dropout",
    "indexer_types",
    "index_topk_pattern",
    "mlp_layer_types",
    "num_nextn_predict_layers",
    "index_share_for_mtp_iteration",
    "dtype",
    "torch_dtype",
    "quantization_config",
)
READ = (*_WHOLE, *_NUMBERS, *_FLAGS, *_EXPERT_COUNTS, *_SCHEDULE, *_FIXED, *_FOREIGN, *_OTHERS, *hf_rope.KEYS)
UNREAD = (  # change nothing here, and are like others in name
    "head_dim",
    "qk_head_dim",
    "layer_types",
    "moe_router_dtype",
)
_FIELDS = tuple(f.name for f in dataclasses.fields(ModelConfig))
_DEFAULTS = {f.name: f.default for f in dataclasses.fields(ModelConfig)}
_NOT_WRITTEN = ("remat",)


def from_hf(
    raw: Mapping[str, Any], where: str = "config.json", stored_dtype: Callable[[], str] | None = None
) -> ModelConfig:
    """Reads the dictionary of a `config.json`, with the aliases and precedence that transformers gives its fields.

    `where` names the file in errors. `stored_dtype` gives the dtype of the tensors beside it, for a config that says
    "auto". Keys that change nothing here, such as token ids, are passed over; a key that looks like one that is read is
    taken for a slip.

    Raises:
        ModelConfigError: naming another architecture, or every value at once that is of another type, out of range or
            not computed here; and where there is none of these, what does not go together.
    """
    if (kind := raw.get("model_type", "glm_moe_dsa")) != "glm_moe_dsa":
        raise ModelConfigError(
            f"{where}: model_type is {show(kind)}: only 'glm_moe_dsa' (GLM-5, 5.1, 5.2) is this architecture"
        )
    values = JsonValues(raw, "", problems := [])
    fields = _fields(values, stored_dtype)
    if not problems:
        try:
            return ModelConfig(**fields)
        except ModelConfigError as error:
            problems.append(str(error))
    count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
    raise ModelConfigError("\n".join([f"{count} in {where}:", *(f"  - {problem}" for problem in problems)]))


def _fields(raw: JsonValues, stored_dtype: Callable[[], str] | None) -> dict[str, Any]:
    """Those of ModelConfig that a file gives."""
    raw.refuse_slips(READ, UNREAD)
    fields = {key: raw.whole(key, *bounds, _DEFAULTS[key]) for key, bounds in _WHOLE.items()}
    fields |= {key: raw.number(key, *bounds, _DEFAULTS[key]) for key, bounds in _NUMBERS.items()}
    fields |= {key: raw.flag(key, _DEFAULTS[key]) for key in _FLAGS}
    counts = [raw.whole(key, 1, _EXPERTS, None, null=key != "n_routed_experts") for key in _EXPERT_COUNTS]
    fields["n_routed_experts"] = next((n for n in counts if n is not None), _DEFAULTS["n_routed_experts"])
    fields["num_nextn_predict_layers"] = raw.whole("num_nextn_predict_layers", 0, 1, 0, null=True)
    fields["index_share_for_mtp_iteration"] = raw.flag("index_share_for_mtp_iteration", False, null=True)
    fields["rope_theta"], fields["yarn"] = hf_rope.read(raw)
    fields["dtype"] = _dtype(raw, stored_dtype)
    for key, value in _FIXED.items():
        raw.one_of(key, (value,), value)
    raw.number("attention_dropout", 0, 0, 0)
    for key, neutral in _FOREIGN.items():
        if not ((value := raw.values.get(key)) is None or value is False or (value is not True and value == neutral)):
            raw.wrong(key, "absent: it is not computed here")
    quantised = JsonValues(raw.object("quantization_config"), "quantization_config.", raw.problems)
    quantised.one_of("weight_block_size", ([BLOCK, BLOCK],), None, null=True)
    heads, kv_heads = fields["num_attention_heads"], raw.whole("num_key_value_heads", 1, _SIZE, 64)
    if not raw.problems and heads != kv_heads:
        raw.problems.append(f"num_key_value_heads={kv_heads} must equal num_attention_heads={heads}")
    return fields | _schedules(raw, fields["num_hidden_layers"])


def _schedules(raw: JsonValues, layers: int) -> dict[str, tuple[str, ...]]:
    """`indexer_types` and `mlp_layer_types`, worked out where every value before them is right."""
    words = ("indexer_types", "index_topk_pattern", "mlp_layer_types")
    given = {key: raw.words(key, letters=key == "index_topk_pattern") for key in words}
    given |= {key: raw.whole(key, *bounds, None, null=True) for key, bounds in _SCHEDULE.items()}
    given = {key: value for key, value in given.items() if value is not None}
    if raw.problems:
        return {}
    try:
        indexer, mlp = schedule.indexer_types(layers, given), schedule.mlp_types(layers, given)
    except schedule.ScheduleError as error:
        raw.problems.append(str(error))
        return {}
    return {"indexer_types": indexer, "mlp_layer_types": mlp}


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
