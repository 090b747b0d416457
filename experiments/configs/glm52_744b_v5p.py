from ml_collections import ConfigDict

from glm_jax.config.strict import default_config
from glm_jax.host.config import RunConfig


def get_config() -> ConfigDict:
    config = default_config(RunConfig)
    config.model.preset = "glm52_744b"
    config.model.changes = {"num_nextn_predict_layers": 1, "remat": True}
    config.mesh.fsdp = 8
    config.mesh.expert = 64

    config.rollout.slots = 512
    config.rollout.window = 131072
    config.rollout.ticks = 256
    config.rollout.queue = 512
    config.rollout.requests = 64
    config.rollout.prefill_slots = 512
    config.rollout.prefill_chunk = 64

    config.learn.micro_batches = 1
    config.learn.rows = 512
    config.learn.length = 131072

    config.rl.steps = 1000
    config.rl.batch = 512
    config.rl.policy_lr.peak = 1e-6
    config.rl.critic_lr.peak = 1e-5
    return config
