"""A draft layer learns to foresee a small policy: cross-entropy in SFT, then the end-to-end TV loss. (CPU, minutes)

The task is a 6 x 6 matrix of zeros and ones, the answer each cell's distance to the nearest zero: 72 tokens. The model
has 6 layers, and a draft layer that is used again for each of up to 5 drafts. Nothing is learned by RL here:

    glm-jax bench drafts --config experiments/configs/drafts.py

trains it on several seeds, the draft stage by either loss, and shows how many tokens a pass gives and what that is
worth in time.
"""

from ml_collections import ConfigDict

from glm_jax.config.strict import default_config
from glm_jax.host.config import RunConfig


def get_config() -> ConfigDict:
    config = default_config(RunConfig)
    config.model.preset = "small"
    config.model.changes = {
        "num_hidden_layers": 6,
        "indexer_types": ("full", "full", "shared", "shared", "full", "shared"),
        "mlp_layer_types": ("dense", *("sparse",) * 5),
        "index_topk": 64,
        "num_nextn_predict_layers": 1,
    }
    config.tasks.families = (
        {"name": "binary_matrix", "settings": {"min_n": 6, "max_n": 6}, "template": "{metadata[matrix]}\n"},
    )
    config.tasks.train_size = 8000
    config.tasks.eval_size = 64

    config.rollout.slots = 32
    config.rollout.window = 200
    config.rollout.ticks = 64
    config.rollout.drafts = (5,)
    config.rollout.prefill_slots = 8
    config.rollout.prefill_chunk = 32

    config.learn.micro_batches = 1
    config.learn.rows = 16
    config.learn.length = 400
    config.learn.indexer_kl = 0.1
    config.learn.draft_depth = 5
    config.learn.advantage = "running_mean"

    config.stages = ("sft", "draft")
    config.sft.steps = 120
    config.sft.batch = 32
    config.sft.policy_lr.peak = 2e-3
    config.sft.policy_lr.warmup = 20
    config.draft.steps = 50
    config.draft.batch = 32
    config.draft.policy_lr.peak = 1e-3
    config.draft.policy_lr.warmup = 5
    config.eval.every = 0
    config.checkpoint.every = 0
    return config
