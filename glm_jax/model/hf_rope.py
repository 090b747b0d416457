"""Rotary positions in `config.json`, in the spellings of several years: plain, or YaRN."""

from __future__ import annotations

from typing import Any

from glm_jax.model.json_values import JsonValues, show
from glm_jax.model.yarn import Yarn

KEYS = ("rope_parameters", "rope_scaling", "rope_theta", "max_position_embeddings", "original_max_position_embeddings")
_PLAIN, _YARN = "default", "yarn"
_OF_ALL = ("rope_type", "type", "rope_theta", "partial_rotary_factor")
_OF_YARN = (
    "factor",
    "original_max_position_embeddings",
    "beta_fast",
    "beta_slow",
    "attention_factor",
    "mscale",
    "mscale_all_dim",
    "truncate",
)
_LONGEST = 2**31 - 1  # positions are int32


def read(raw: JsonValues) -> tuple[float, Yarn | None]:
    """θ, and how it is scaled. The object is `rope_parameters` or `rope_scaling`, its kind `rope_type` or `type`.

    As in transformers θ is the object's, else that beside it, else 10000, and YaRN's original length is by default
    `max_position_embeddings`.
    """
    length = raw.whole("max_position_embeddings", 1, _LONGEST, 202752)
    theta = raw.number("rope_theta", 1.001, 1e12, 10000.0, null=True)
    original = raw.whole("original_max_position_embeddings", 1, _LONGEST, None, null=True)
    spelt = {key: values for key in ("rope_parameters", "rope_scaling") if (values := raw.object(key))}
    if len(spelt) == 2 and _plainly(spelt["rope_parameters"]) != _plainly(spelt["rope_scaling"]):
        raw.problems.append("rope_parameters and rope_scaling say different things; write all into rope_parameters")
    found: tuple[float, Yarn | None] = theta, None
    for name, values in reversed(spelt.items()):
        found = _object(JsonValues(values, f"{raw.where}{name}.", raw.problems), theta, length)
    if original is not None and (found[1] is None or found[1].original_max_position_embeddings != original):
        raw.problems.append(
            f"original_max_position_embeddings is {original}; it belongs into rope_parameters, with rope_type 'yarn'"
        )
    return found


def write(theta: float, yarn: Yarn | None) -> dict[str, Any]:
    """`rope_parameters`."""
    if yarn is None:
        return {"rope_theta": theta, "rope_type": _PLAIN}
    given = {key: value for key in _OF_YARN if (value := getattr(yarn, key)) is not None}
    return {"rope_theta": theta, "rope_type": _YARN, **given}


def _plainly(values: dict[str, Any]) -> dict[str, Any]:
    return {"rope_type" if key == "type" else key: value for key, value in values.items() if value is not None}


def _object(values: JsonValues, theta: float, length: int) -> tuple[float, Yarn | None]:
    kinds = {key: kind for key in ("rope_type", "type") if (kind := values.values.get(key)) is not None}
    kind = next(iter(kinds.values()), _PLAIN)
    for key, named in kinds.items():
        if named not in (_PLAIN, _YARN):
            values.wrong(key, f"'{_PLAIN}' or '{_YARN}': no other scaling is computed here")
            return theta, None
        if named != kind:
            values.wrong(key, f"the same as rope_type, {show(kind)}")
    values.refuse_unknown((*_OF_ALL, *_OF_YARN))
    if kind == _PLAIN and (stray := [key for key in _OF_YARN if values.values.get(key) is not None]):
        values.problems.append(
            f"{values.where}rope_type is '{_PLAIN}', or absent, and {', '.join(stray)} would go unread: "
            f"write '{_YARN}', or leave them out"
        )
    values.number("partial_rotary_factor", 1, 1, 1.0, null=True)
    theta = values.number("rope_theta", 1.001, 1e12, theta, null=True)
    if kind == _PLAIN:
        return theta, None
    if "factor" not in values.values:
        values.problems.append(f"{values.where}factor is missing: how many times longer than the trained context?")
    positive = lambda key, default: values.number(key, 1e-6, 1e6, default, null=True)
    yarn = Yarn(
        factor=values.number("factor", 1, 1e6, 1.0),
        original_max_position_embeddings=values.whole("original_max_position_embeddings", 1, _LONGEST, length),
        beta_fast=positive("beta_fast", 32.0),
        beta_slow=positive("beta_slow", 1.0),
        attention_factor=positive("attention_factor", None),
        mscale=values.number("mscale", 0, 1e3, None, null=True),
        mscale_all_dim=values.number("mscale_all_dim", 0, 1e3, None, null=True),
        truncate=values.flag("truncate", True, null=True),
    )
    if yarn.beta_fast <= yarn.beta_slow:
        values.problems.append(f"{values.where}beta_fast={yarn.beta_fast} must exceed beta_slow={yarn.beta_slow}")
    return theta, yarn
