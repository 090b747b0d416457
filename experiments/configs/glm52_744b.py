"""GLM-5.2 at full size on pods: RL with critic and draft layer, sampling and learning in one program.

glm-jax plan --config experiments/configs/glm52_744b.py:v5p --topology v5p:8x8x8 --segment 8192
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
