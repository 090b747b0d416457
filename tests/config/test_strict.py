"""The strict reader of configs: every mistake told at once, each with its key and what would be right."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Literal

import pytest
from ml_collections import ConfigDict

from glm_jax.config.strict import ConfigError, default_config, fingerprint, read, render


@dataclass(frozen=True)
class Inner:
    lr: float = 1  # an int where a float is meant, as people write it
    betas: tuple[float, float] = (0.9, 0.95)
    kind: Literal["sao", "group"] = "sao"
    per_prompt: int = 1

    def check(self) -> list[str]:
        lone = self.kind == "group" and self.per_prompt < 2
        return ["kind = 'group' wants per_prompt > 1; set per_prompt or use 'sao'"] if lone else []


@dataclass(frozen=True)
class Family:
    name: str
    weight: float = 1.0
    settings: dict = field(default_factory=dict)


@dataclass(frozen=True)
class Outer:
    steps: int
    inner: Inner = Inner()
    path: str | None = None
    families: tuple[Family, ...] = (Family("spell"),)
    resume: bool = False
    extra: Inner | None = None


def problems(values: dict) -> str:
    with pytest.raises(ConfigError) as caught:
        read(Outer, values)
    return str(caught.value)


def test_nested_values_become_frozen_dataclasses_and_absent_keys_take_their_defaults():
    values = {"steps": 3, "inner": {"lr": 2, "betas": [0.5, 1]}, "families": [{"name": "a", "settings": {"n": 1}}]}
    found = read(Outer, values)
    assert found == Outer(3, Inner(2.0, (0.5, 1.0)), families=(Family("a", 1.0, {"n": 1}),))
    assert isinstance(found.inner.lr, float) and isinstance(found.inner.betas[1], float)


def test_every_problem_is_told_in_one_error():
    text = problems({"inner": {"lrr": 1.0, "kind": "soa"}, "resume": 1, "families": [{"name": 3}], "path": 4})
    assert text.startswith("6 problems in config:")
    assert "config.steps is missing" in text
    assert "config.inner.lrr is no known key; did you mean config.inner.lr?" in text
    assert "config.inner.kind is 'soa' (str); it has to be one of 'sao', 'group' (did you mean 'sao'?)" in text
    assert "config.resume is 1 (int); it has to be bool" in text
    assert "config.families[0].name is 3 (int); it has to be str" in text
    assert "config.path is 4 (int); it has to be str" in text


@pytest.mark.parametrize(
    ("values", "part"),
    [
        ({"steps": True}, "config.steps is True (bool); it has to be int"),
        ({"steps": 1.0}, "config.steps is 1.0 (float); it has to be int"),
        ({"steps": None}, "config.steps is missing; set it to int"),
        ({"steps": 1, "resume": None}, "config.resume is None (NoneType); it has to be bool"),
        ({"steps": 1, "inner": {"lr": float("nan")}}, "config.inner.lr is nan (float)"),
        ({"steps": 1, "inner": {"lr": "1e-6"}}, "config.inner.lr is '1e-6' (str); it has to be float"),
        ({"steps": 1, "inner": {"betas": [1.0]}}, "with 1 entries; it has to have 2"),
        ({"steps": 1, "inner": 5}, "config.inner is 5 (int); it wants a mapping with the keys of Inner"),
        ({"steps": 1, "zzzzz": 5}, "known here: steps, inner, path, families, resume, extra"),
        ({"steps": 1, "extra": {"kindd": "sao"}}, "did you mean config.extra.kind?"),
    ],
)
def test_a_wrong_value_is_named_with_what_would_be_right(values: dict, part: str):
    assert part in problems(values)


def test_cross_field_checks_are_told_beside_other_problems():
    text = problems({"steps": 1, "inner": {"kind": "group"}, "stesp": 2})
    assert "config.inner: kind = 'group' wants per_prompt > 1" in text
    assert "did you mean config.steps?" in text


def test_a_value_error_of_a_schema_is_a_config_error():
    @dataclass(frozen=True)
    class Even:
        n: int = 0

        def __post_init__(self):
            if self.n % 2:
                raise ValueError(f"n is {self.n}; it has to be even")

    with pytest.raises(ConfigError, match="config: n is 3; it has to be even"):
        read(Even, {"n": 3})


def test_default_config_reaches_every_key_and_reads_back_as_the_defaults():
    config = default_config(Outer)
    assert set(config) == {entry.name for entry in dataclasses.fields(Outer)}
    config.steps = 5
    assert read(Outer, config) == dataclasses.replace(Outer(5), inner=Inner(lr=1.0))
    config.inner.lr = 1e-6  # the default is an int
    config.path = "somewhere"
    config.families = ({"name": "b"},)
    assert read(Outer, config) == Outer(5, Inner(lr=1e-6), "somewhere", (Family("b"),))


def test_default_config_says_which_keys_a_run_still_has_to_set():
    with pytest.raises(ConfigError, match="config.steps is missing"):
        read(Outer, default_config(Outer))


def test_render_shows_every_leaf_with_its_whole_key():
    lines = render(Outer(3, path="p")).splitlines()
    assert "steps = 3" in lines
    assert "inner.betas = (0.9, 0.95)" in lines
    assert "path = 'p'" in lines
    assert "families = ({'name': 'spell', 'weight': 1.0, 'settings': {}},)" in lines


def test_fingerprint_sees_values_and_not_the_order_of_keys():
    one = {"a": 1, "b": {"c": [1, 2], "d": "x"}}
    other = ConfigDict({"b": {"d": "x", "c": (1, 2)}, "a": 1})
    assert fingerprint(one) == fingerprint(other)
    assert len(fingerprint(one)) == 64
    assert fingerprint(Outer(1)) != fingerprint(Outer(2))
    assert fingerprint(Outer(1)) == fingerprint(read(Outer, {"steps": 1, "inner": {"lr": 1}}))
