"""Rotary positions in a config's many spellings, and what YaRN makes of them."""

from __future__ import annotations

import dataclasses
import json

import jax.numpy as jnp
import numpy as np
import pytest

from glm_jax.model.config import ModelConfigError
from glm_jax.model.hf_config import from_hf, to_hf
from glm_jax.model.rope import rope_tables
from glm_jax.model.yarn import Yarn
from tests.model.tiny import tiny_config

PLAIN = to_hf(tiny_config()) | {"rope_parameters": None, "max_position_embeddings": 512}


@pytest.mark.parametrize(
    "yarn, frequency, of_tables, of_scores",
    [  # by transformers 5.24 for 16 rotated channels, θ = 10000
        (Yarn(4.0, 64), [1, 0.2371708, 0.05, 0.007905695, 0.0025, 7.905695e-4, 2.5e-4, 7.905695e-5], 1.1386294, 1.0),
        (
            Yarn(40.0, 4096, mscale=1.0, mscale_all_dim=0.7, beta_fast=16.0, beta_slow=2.0),
            [1, 0.3162278, 0.1, 0.03162278, 0.006749999, 0.001106797, 2.5e-5, 7.905694e-6],
            1.0879546,
            1.5831215,
        ),
        (
            Yarn(8.0, 1024, attention_factor=1.5, truncate=False, mscale_all_dim=1.0),
            [1, 0.3162278, 0.08296508, 0.01704411, 0.002483133, 3.952847e-4, 1.25e-4, 3.952847e-5],
            1.5,
            1.4591291,
        ),
        (  # all channels are slow: the ramp has no width
            Yarn(2.0, 4),
            [1, 0.1581139, 0.05, 0.01581139, 0.005, 0.001581139, 5e-4, 1.581139e-4],
            1.0693147,
            1.0,
        ),
    ],
)
def test_yarn_is_what_transformers_makes_of_it(yarn, frequency, of_tables, of_scores):
    config = tiny_config(qk_rope_head_dim=16, index_head_dim=16, yarn=yarn)
    assert config.softmax_scale == pytest.approx(24**-0.5 * of_scores, rel=1e-6)
    cos, sin = rope_tables(jnp.array([0, 1]), config)
    np.testing.assert_allclose(np.hypot(cos, sin), of_tables, rtol=1e-6)
    np.testing.assert_allclose(np.arctan2(sin[1], cos[1]), frequency, rtol=1e-5)


@pytest.mark.parametrize("name", ["rope_parameters", "rope_scaling"])
@pytest.mark.parametrize("kind", ["type", "rope_type"])
def test_every_spelling_is_read(name, kind):
    bare = {k: v for k, v in PLAIN.items() if k != "rope_parameters"}
    assert from_hf({**bare, name: {kind: "default"}, "rope_theta": 7.0}).yarn is None
    config = from_hf({**bare, name: {kind: "yarn", "factor": 4}, "rope_theta": 7.0})
    assert config.rope_theta == 7.0 and config.yarn == Yarn(4.0, 512)
    assert from_hf({**bare, name: {kind: "yarn", "factor": 4, "rope_theta": 9}, "rope_theta": 7.0}).rope_theta == 9.0
    with pytest.raises(ModelConfigError, match=f"{name}.{kind} is 'linear'.*'default' or 'yarn'"):
        from_hf({**bare, name: {kind: "linear", "factor": 4}})


def test_one_spelling_beside_another_is_read_where_both_say_the_same():
    yarn = {"factor": 4, "rope_theta": 9.0}
    both = {"rope_parameters": {"rope_type": "yarn", **yarn}, "rope_scaling": {"type": "yarn", **yarn}}
    assert from_hf({**PLAIN, **both}).yarn == Yarn(4.0, 512)
    assert from_hf({**PLAIN, "rope_scaling": {}, "rope_parameters": {"rope_theta": 9.0}}).yarn is None
    with pytest.raises(ModelConfigError, match="say different things"):
        from_hf({**PLAIN, **both, "rope_parameters": {"rope_type": "default", "rope_theta": 9.0}})


@pytest.mark.parametrize(
    "change, told",
    [
        (dict(factor=None), "factor is null; it has to be a number from 1"),
        (dict(factor=0.5), "factor is 0.5"),
        (dict(factr=4), "rope_parameters.factr is no known key"),
        (dict(type="default"), "type is 'default' .*; it has to be the same as rope_type, 'yarn'"),
        (dict(beta_fast=1, beta_slow=2), "beta_fast=1.0 must exceed beta_slow=2.0"),
        (dict(partial_rotary_factor=0.5), "partial_rotary_factor is 0.5"),
        (dict(truncate=1), "truncate is 1"),
        (dict(attention_factor=0), "attention_factor is 0"),
        (dict(rope_theta=1), "rope_theta is 1"),
    ],
)
def test_what_yarn_cannot_be_is_refused_by_its_key(change, told):
    with pytest.raises(ModelConfigError, match=told):
        from_hf({**PLAIN, "rope_parameters": {"rope_type": "yarn", "factor": 4, **change}})


def test_a_scaling_that_would_go_unread_is_refused():
    with pytest.raises(ModelConfigError, match="rope_scaling.factor is missing"):
        from_hf({**PLAIN, "rope_scaling": {"type": "yarn"}})
    with pytest.raises(ModelConfigError, match="rope_scaling.rope_type is .* factor would go unread"):
        from_hf({**PLAIN, "rope_scaling": {"factor": 4}})
    with pytest.raises(ModelConfigError, match="original_max_position_embeddings is 64; it belongs into"):
        from_hf({**PLAIN, "original_max_position_embeddings": 64})


def test_yarn_survives_being_written():
    full = Yarn(4.0, 64, 16.0, 2.0, attention_factor=1.5, mscale=0.7, mscale_all_dim=1.0, truncate=False)
    for yarn in (Yarn(4.5, 64), full):
        config = tiny_config(yarn=yarn, rope_theta=77.0)
        again = from_hf(json.loads(json.dumps(to_hf(config))))
        assert dataclasses.replace(again, initializer_range=config.initializer_range) == config
