"""GLM-5.2 at full size on pods: RL with critic and draft layer, sampling and learning in one program.

glm-jax plan --config experiments/configs/glm52_744b.py:v5p --topology v5p:8x8x8 --segment 8192 --part sample

`:v5p` is for v5p:8x8x8, `:tpu7x` for tpu7x:4x4x8, `:v6e` for v6e:16x16, `:h200` for h200:16x8. Every device samples
one sequence of 128k tokens and learns one row of 8k (`--segment`). Expected, GiB per device; state and activations are
those of the shapes, parameters and both moments in bfloat16:

| | v5p:8x8x8 | tpu7x:4x4x8, v6e:16x16 |
|---|---|---|
| weights, optimizer, critic | 2.99, 5.84, 8.35 | 5.85, 11.45, 16.57 |
| caches | 11.88 | 11.75 |
| activations of a row of 8k | 10.92 | 10.92 |
| a device has | 95.74 | 94.75; 31.25: the state alone does not fit |
| a round that never learns, compiled (experiments/plans) | 71.77, of it temporaries 42.47 | |

That compile took 529 s on two busy cores and 4.5 GiB of host memory. Its temporaries hold the sampling layout of what
is no MLP (attention, embeddings: whole on every device), and the latent cache once more: XLA copies its 11 GiB into
another layout before the loop of ticks, and back after it. Since then caches hold rows in words that the kernels read
(15.7 GiB of the 11.88 above): in a cut of three layers no cache is copied any more (tests/rollout/test_compile.py); the
whole was not compiled again. The whole round has not been compiled to its end: it was
stopped at 13 GiB of host memory. The other presets have been laid out, not compiled.
"""

from ml_collections import ConfigDict

from glm_jax.config.strict import default_config
from glm_jax.host.config import RunConfig

# Sizes of the axes `fsdp` and `expert`, by the machine that they are for.
MESHES = {"v5p": (8, 64), "tpu7x": (4, 64), "v6e": (4, 64), "h200": (2, 64)}


def get_config(machine: str = "v5p") -> ConfigDict:
    config = default_config(RunConfig)
    config.model.preset = "glm52_744b"  # its shape; a run starts from the weights of a folder: model.path
    config.model.changes = {"num_nextn_predict_layers": 1, "remat": True}
    config.mesh.fsdp, config.mesh.expert = MESHES[machine]
    devices = config.mesh.fsdp * config.mesh.expert

    config.rollout.slots = devices
    config.rollout.window = 131072
    config.rollout.ticks = 256
    config.rollout.queue = devices
    config.rollout.requests = 64
    config.rollout.prefill_slots = devices
    config.rollout.prefill_chunk = 64

    config.learn.rows = devices
    config.learn.length = 131072

    config.rl.batch = devices
    config.rl.steps = 1000
    config.rl.policy_lr.peak = 1e-6
    config.rl.critic_lr.peak = 1e-5
    return config
