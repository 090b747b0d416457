"""A run's config: every mistake that only several fields show has its own message, and all are told at once."""

from __future__ import annotations

import pytest

from glm_jax.config.strict import ConfigError, default_config, read
from glm_jax.host.config import RunConfig
from glm_jax.host.run import make_plan
from glm_jax.host.workdir import flat


def config(**changes):
    """A config that runs, with the changes (a__b=value sets a.b)."""
    made = default_config(RunConfig)
    base = dict(model__preset="small", rl__steps=4, rl__batch=8, rl__policy_lr__peak=1e-4, rl__critic_lr__peak=1e-3)
    base |= dict(rollout__window=32, learn__rows=8, learn__length=32)
    for name, value in (base | changes).items():
        *path, last = name.split("__")
        here = made
        for part in path:
            here = here[part]
        with here.ignore_type():
            here[last] = value
    return made


def test_the_base_of_these_tests_is_a_config_that_runs():
    found = read(RunConfig, config())
    assert [stage.name for stage in make_plan(found).stages] == ["rl"] and make_plan(found).steps == 4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(checkpoint__keep_best=1, eval__samples=0), "keep_best goes by eval/reward, and eval.samples = 0"),
        (dict(learn__advantage="group"), "rollouts_per_prompt is 1: raise it, or set learn.advantage to 'sao'"),
        (dict(rollouts_per_prompt=4), "rollouts_per_prompt is 4, but learn.advantage = 'sao'"),
        (
            dict(learn__advantage="group", rollouts_per_prompt=3),
            "rl.batch = 8 is no multiple of rollouts_per_prompt = 3",
        ),
        (dict(staleness__tau=-1), "tau is -1"),
        (dict(rollout__window=64), "rollout.window = 64 exceeds learn.length = 32"),
        (dict(rl__batch=9), "rl.batch = 9 rollouts of up to 32 tokens need not fit 1 x 8 rows of 32, which hold 8"),
        (
            dict(mesh__data=3),
            "rollout.slots = 64 cannot be split over data x stage x fsdp x expert x context = 3 devices evenly",
        ),
        (dict(mesh__data=16), "learn.rows = 8 cannot be split over data x stage x fsdp x expert = 16 devices evenly"),
        (dict(mesh__context=64), "learn.length = 32 cannot be split over context = 64 devices evenly: change it or"),
        (dict(mesh__context=2, mesh__tensor=2), "tensor=2 with context=2: a model split over tensor is left to XLA"),
        (dict(rl__steps=0), "no stage has steps"),
        (dict(stages=("rl", "sft")), "they run in the order sft, draft, value, rl"),
        (dict(stages=("rl", "dpo")), "stages holds ['dpo']"),
        (dict(learn__advantage="running_mean", value__steps=2), "has no critic to train"),
        (dict(rl__critic_lr__peak=0.0), "rl.critic_lr.peak is 0, so stage rl would learn nothing"),
        (dict(deterministic=True, wall_time=9.0), "wall_time goes by the clock"),
        (dict(limits__tokens=0), "config.limits: tokens is 0; it must be at least 1, or None"),
        (dict(limits__strings=("",)), "stop string 0 is empty"),
        (dict(patience=0.0), "patience is 0.0"),
        (dict(model__preset="big"), "preset is 'big'; known: glm52_744b, small"),
        (
            dict(model__changes={"index_topkk": 1}),
            "changes.index_topkk is no known key; did you mean changes.index_topk?",
        ),
        (dict(model__changes={"index_topk": "abc"}), "changes.index_topk is 'abc' (str); it has to be int"),
        (dict(model__changes={"index_topk": -1}), "index_topk=-1 must be at least 1"),
        (dict(model__changes={"num_hidden_layers": 2}), "indexer_types has 3 entries for num_hidden_layers=2"),
        (dict(model__path="somewhere"), "one of preset and path has to be set"),
        (dict(reward__low=1.0), "low must be below high"),
        (dict(rl__until=0.5), "rl.until is 0.5, but only sft ends by its loss"),
        (dict(checkpoint__keep=0), "keep is 0; it must be at least 1"),
        (dict(eval__evry=3), "config.eval.evry is no known key; did you mean config.eval.every?"),
    ],
)
def test_each_mistake_has_its_message(changes, message):
    with pytest.raises(ConfigError) as error:
        read(RunConfig, config(**changes))
    assert message in str(error.value)


def test_all_mistakes_are_told_at_once():
    with pytest.raises(ConfigError) as error:
        read(RunConfig, config(staleness__tau=-1, learn__advantage="group", rl__batch=9, eval__evry=3))
    assert all(text in str(error.value) for text in ("tau is -1", "evry", "rollouts_per_prompt", "rl.batch = 9"))


def test_the_flat_config_holds_json_values_under_dotted_keys():
    values = flat(read(RunConfig, config()))
    assert values["rl.policy_lr.peak"] == 1e-4 and values["stages"] == ["sft", "draft", "value", "rl"]
    assert values["model.path"] is None
