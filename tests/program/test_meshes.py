"""One device and up to eight give the same tokens, losses, gradients and weights, however the mesh is cut."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from glm_jax.learn.optimizer import MAIN
from tests.model.tiny import named_leaves, three_layers
from tests.program.runs import MODEL, on_one_device, program, sampled, scenario

# Once first moments are (1 - b1) · gradient; later they are sums of gradients, in which a difference would stay.
STATES = ["rl", "sft", "value", "end"]
STAGED = three_layers(indexer_types=("full", "full", "full"))  # the last two one in each stage
MESHES = {
    "expert=4 data=2": dict(expert=4, data=2),
    "data=8": dict(data=8),
    "fsdp=8": dict(fsdp=8),
    "context=8": dict(context=8),
    "fsdp=2 expert=2 tensor=2": dict(fsdp=2, expert=2, tensor=2),
    "fsdp=2 expert=2 context=2": dict(fsdp=2, expert=2, context=2),
    "stage=2": dict(stage=2),
    "stage=2 expert=2 context=2": dict(stage=2, expert=2, context=2),
}


def close(got, want, scale: float, name: str) -> None:
    np.testing.assert_allclose(np.asarray(got) / scale, np.asarray(want) / scale, atol=5e-5, err_msg=name)


@pytest.mark.scale
@pytest.mark.parametrize("mesh", MESHES)
def test_many_devices_give_what_one_gives(mesh):
    model = STAGED if "stage" in mesh else MODEL
    want, got = on_one_device(model), scenario(program(MESHES[mesh], model=model))
    mine, theirs = sampled(got.logs), sampled(want.logs)
    assert {r: [t for t, _ in pairs] for r, pairs in mine.items()} == {r: [t for t, _ in p] for r, p in theirs.items()}
    for rollout, pairs in theirs.items():
        logp = [p for _, p in pairs]
        close([p for _, p in mine[rollout]], logp, max(np.abs([1.0, *logp])), f"log-probs of rollout {rollout}")
    for n, metrics in enumerate(want.metrics):
        for name, value in metrics.items():
            if n < 2 and name.startswith("sample/"):
                continue  # more rollouts than slots: who samples when hangs on which slots there are
            close(got.metrics[n][name], value, max(1.0, abs(value)), f"round {n}: {name}")
    for state in STATES:
        for side in ("policy", "critic"):
            a, b = (getattr(run.seen[state], side) for run in (got, want))
            moments = [named_leaves(learner.opt_state[MAIN][0].mu) for learner in (a, b)]
            scale = max(float(np.abs(m).max()) for m in moments[1].values())
            for name, value in moments[1].items():
                close(moments[0][name], value, scale or 1.0, f"{state}: gradient of {side}{name}")
            for name, value in named_leaves(b.params).items():
                close(named_leaves(a.params)[name], value, 1.0, f"{state}: {side}{name}")
    assert got.program.round._cache_size() == 1
    layouts = {str(leaf.sharding.spec) for leaf in jax.tree.leaves(got.state.policy.params)}
    assert len(layouts) > 1, "the parameters are spread over the mesh"
