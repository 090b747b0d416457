"""A small policy learns to use tools by SAO, in real sandboxes, on a laptop CPU. Wants bubblewrap.

    glm-jax train --config experiments/configs/tool_use.py --workdir runs/tools

Each task is an instance of the family experiments/families/copy-word: read the word in one file, write it into
another, submit; three turns, about 57 sampled tokens. The policy (0.49 M parameters, from nothing) learns from 300
transcripts of the oracle, up to a loss at which it gets a seventh to two fifths of held-out tasks right: it knows how
calls are written and copies letters badly. Then come 8 batches for the critic and 80 rounds of RL with 64 rollouts
each, on 2,000 tasks. The only reward is that of the family's gated verifier, in a box of its own; what is not submitted
gets 0.

Expected, reward on 150 held-out tasks sampled at temperature 1, on two cores with nothing else to do:

| seed | before RL | after 25 rounds | after 50 | after 75 | after 80 | minutes, compiling included |
|---|---|---|---|---|---|---|
| 0 | 0.393 | 0.620 | 0.780 | 0.847 | 0.853 | 8.7 |
| 1 | 0.140 | 0.280 | 0.307 | 0.440 | 0.440 | 8.4 |

The critic explains next to nothing (less than a tenth of the variance) after so little pre-training: it serves as a
mean of rewards. Of the time two fifths go to learning, a third to sampling, a tenth to waiting for boxes.
"""

from ml_collections import ConfigDict

from glm_jax.config.strict import default_config
from glm_jax.host.config import RunConfig


def get_config() -> ConfigDict:
    config = default_config(RunConfig)
    config.model.preset = "small"
    config.model.changes = {"index_topk": 128}  # a whole rollout is up to 160 tokens
    config.tasks.source = "environments"
    config.tasks.environments = ("experiments/families/copy-word",)
    config.tasks.train_size = 2000
    config.tasks.eval_size = 150
    config.tools.turns = 6
    config.tools.observation = 32
    config.tools.command_seconds = 10.0
    config.tools.transcripts = 300

    config.rollout.slots = 64
    config.rollout.window = 160
    config.rollout.ticks = 64
    config.rollout.queue = 256
    config.rollout.requests = 256
    config.rollout.prefill_slots = 16
    config.rollout.prefill_chunk = 16

    config.learn.micro_batches = 4
    config.learn.rows = 16
    config.learn.length = 160
    config.learn.indexer_kl = 0.1
    config.staleness.tau = 0

    config.sft.steps = 400
    config.sft.until = 0.03
    config.sft.batch = 64
    config.sft.policy_lr.peak = 2e-3
    config.sft.policy_lr.warmup = 20
    config.value.steps = 8
    config.value.batch = 64
    config.value.critic_lr.peak = 2e-3
    config.value.critic_lr.warmup = 2
    config.rl.steps = 80
    config.rl.batch = 64
    config.rl.policy_lr.peak = 5e-4
    config.rl.policy_lr.warmup = 5
    config.rl.policy_lr.shape = "cosine"
    config.rl.policy_lr.end = 0.2
    config.rl.critic_lr.peak = 1e-3
    config.eval.every = 25
    config.checkpoint.every = 0
    return config
