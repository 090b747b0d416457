"""Parts of memory that add up, activations by hand, and the nearest change by which a config would fit."""

from __future__ import annotations

import dataclasses
import json

import jax
import pytest

from glm_jax.host.config import ModelSource, RunConfig
from glm_jax.learn.config import LearnConfig
from glm_jax.plan import account, cost, picture, program, report
from glm_jax.plan.compile import exceeded
from glm_jax.plan.errors import PlanError
from glm_jax.rollout.config import RolloutConfig
from glm_jax.sharding.mesh import MeshConfig
from tests.model.tiny import SHAPE

GIB = 2**30
MODEL = ModelSource(preset="small", changes={**SHAPE, "remat": True})
CONFIG = RunConfig(
    model=MODEL,
    rollout=RolloutConfig(slots=16, window=32, ticks=8, queue=8, requests=8, prefill_slots=8, prefill_chunk=8),
    learn=LearnConfig(rows=16, length=32, micro_batches=2),
    mesh=MeshConfig(fsdp=4, expert=2),
)
STATE = {"weights": 8 * GIB, "optimizer": 16 * GIB, "critic": 20 * GIB, "caches": 12 * GIB}
FOUND = {
    "state": STATE,
    "activations": 6 * GIB,
    "activations_with_remat": 1 * GIB,
    "memory": {"argument": 57 * GIB, "output": 56 * GIB, "alias": 56 * GIB, "temp": 10 * GIB, "generated_code": GIB},
}


def test_parts_add_up_to_what_the_compiler_says():
    parts = account.parts(FOUND)
    assert tuple(parts) == account.PARTS
    memory = FOUND["memory"]
    total = memory["argument"] + memory["output"] - memory["alias"] + memory["temp"] + memory["generated_code"]
    assert sum(parts.values()) == total
    assert (parts["activations"], parts["temporaries"], parts["other"]) == (6 * GIB, 4 * GIB, 2 * GIB)


def test_of_a_program_that_was_refused_the_parts_add_up_to_what_it_would_have_taken():
    refused = {k: v for k, v in FOUND.items() if k != "memory"}
    by_all = account.parts({**refused, "needed": {"all": 100 * GIB}})
    assert sum(by_all.values()) == 100 * GIB
    by_temporaries = account.parts({**refused, "needed": {"temp": 100 * GIB}})
    assert sum(by_temporaries.values()) == sum(STATE.values()) + 100 * GIB


@pytest.mark.parametrize(
    ("message", "needed"),
    [
        ("Ran out of memory in memory space hbm. Used 123.50G of 95.74G hbm. Exceeded", {"all": 123.5 * GIB}),
        ("the total memory required for HLO temporaries (1.50T) exceeds available HBM (95.74G).", {"temp": 1536 * GIB}),
        ("INTERNAL: something else", None),
    ],
)
def test_a_refusal_is_read(message, needed):
    assert exceeded(message) == needed


def test_the_nearest_change_is_the_mildest_that_suffices():
    parts = account.parts(FOUND)
    total = sum(parts.values())
    change = lambda capacity, with_remat=1 * GIB: account.nearest_change(CONFIG, parts, capacity, with_remat)
    assert change(total - 5 * GIB).startswith("model.changes.remat=True: ")
    assert change(total - 5 * GIB, parts["activations"]).startswith("rollout.slots=8: 62.0 GiB")
    assert change(total - 3 * GIB, parts["activations"]).startswith("learn.rows=8 with learn.micro_batches=4: ")
    assert change(total - 20 * GIB).startswith("mesh.fsdp=8 on 2 times the devices: ")
    one_a_device = dataclasses.replace(CONFIG, learn=dataclasses.replace(CONFIG.learn, rows=8))
    change_of_it = account.nearest_change(one_a_device, parts, total - 20 * GIB, 1 * GIB)
    assert change_of_it.startswith("mesh.context=2 on 2 times the devices: "), "rows cannot be split further"
    assert change(1 * GIB).startswith("none of one key: critic take the most, 20.0 GiB")


def test_what_a_device_holds_is_what_is_allocated_on_it():
    """The state of a config made for real, and what of it lies on the first device."""
    built = program.program_of(CONFIG, jax.devices())
    state = built.init(0)
    told = program.state_bytes(program.arguments(built, CONFIG)[0])
    one = lambda tree: sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(tree))
    made = {"weights": state.policy.params, "optimizer": state.policy.opt_state}
    made |= {"critic": state.critic, "caches": state.sampler}
    assert told == {name: one(tree) for name, tree in made.items()}


def test_with_remat_each_layers_input_is_kept_and_without_more():
    kept = lambda config: program.activation_bytes(program.program_of(config, jax.devices()), config)
    change = lambda **changes: dataclasses.replace(CONFIG, **changes)
    learn = lambda **changes: change(learn=dataclasses.replace(CONFIG.learn, **changes))
    # A row more keeps so much more: of the model's four layers the inputs, in float32.
    inputs = 4 * 32 * SHAPE["hidden_size"] * 4
    more = (kept(learn(rows=32)) - kept(CONFIG)) / 2
    assert inputs <= more < 4 * inputs
    plain = change(model=dataclasses.replace(MODEL, changes={**SHAPE, "remat": False}))
    assert kept(plain) > 2 * kept(CONFIG)
    built = program.program_of(plain, jax.devices())
    assert program.activation_bytes(built, plain, remat=True) == kept(CONFIG)


def test_the_roofline_is_the_longest_of_three_times():
    phase = {"flops": 4e12, "hbm_bytes": 6e9, "collectives": [{"bytes": 1e9}, {"bytes": 2e9}], "cycles": 0}
    found = account.roofline({"x": phase}, tflops=2, hbm_gb_s=3, link_gb_s=1)["x"]
    assert found == {"products": 2.0, "hbm": 2.0, "links": 3.0, "longest": 3.0}


@pytest.fixture
def compiled(monkeypatch):
    """The report on what a compiling process found."""
    one = cost.Cost(flops=1e12, hbm_bytes=2e9, cycles=1e6)
    one.collectives["all-to-all", "expert"], one.calls["all-to-all", "expert"] = 5e6, 3
    phases = {name: cost.plain(one) for name in (cost.TICK, cost.PREFILL, cost.LEARN, cost.ONCE)}
    found = {**FOUND, "devices": 8, "phases": phases, "largest": [], "lower_seconds": 1.0, "compile_seconds": 2.0}
    found["host_gib"] = 3.0
    monkeypatch.setattr(report, "compiled", lambda *_: found)
    return found


def test_a_plan_tells_in_text_json_and_picture(compiled, tmp_path):
    plan = report.plan(CONFIG, "v5p:2x2x2", limit_minutes=1)
    assert plan["fits"] and plan["change"] is None
    assert plan["hbm_gib_per_chip"] == pytest.approx(68) and plan["hbm_gib_available"] == 95.74
    assert {"compile_seconds", "host_gib", "parts_gib"} <= set(json.loads(json.dumps(plan)))
    tick = plan["seconds"][cost.TICK]["longest"]
    rest = sum(plan["seconds"][name]["longest"] for name in (cost.LEARN, cost.ONCE))
    assert plan["round_seconds"]["all"] == pytest.approx(8 * tick + rest)
    text = report.table(plan)
    assert "v5p:2x2x2, 8 devices (fsdp 4 × expert 2), the whole round: fits, 68.00 of 95.74 GiB per device" in text
    assert "all-to-all           expert" in text
    picture.draw(plan, tmp_path / "plan.png")
    assert (tmp_path / "plan.png").read_bytes()[:4] == b"\x89PNG"


def test_a_plan_that_does_not_fit_names_a_change(compiled):
    plan = report.plan(dataclasses.replace(CONFIG, mesh=MeshConfig(fsdp=2, expert=2)), "v6e:2x2", limit_minutes=1)
    assert not plan["fits"]
    assert "v6e:2x2" in report.table(plan) and "does not fit" in report.table(plan)
    assert "nearest change: mesh.fsdp=8 on 4 times the devices: " in report.table(plan)


def test_a_mesh_of_another_size_than_the_topology_is_refused():
    with pytest.raises(PlanError, match="the mesh has 8 devices and v5p:8x8x8 has 512: set mesh.fsdp"):
        report.plan(CONFIG, "v5p:8x8x8", limit_minutes=1)
