"""Puts the rooms together: a model, its program and state, and the desk through which rollouts pass."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax

from glm_jax.data.tasks import Task
from glm_jax.data.tokenizer import Tokenizer
from glm_jax.envs.pool import Pool
from glm_jax.envs.rewards import RewardPool
from glm_jax.host import calls, playground
from glm_jax.host.config import RunConfig
from glm_jax.host.device import Device
from glm_jax.host.divided import Divided
from glm_jax.host.environments import Environments
from glm_jax.host.errors import RunError
from glm_jax.host.ledger import Ledger
from glm_jax.host.peers import ALONE, Peers
from glm_jax.host.sampling import Draw, Sampling
from glm_jax.host.scoring import Scorer
from glm_jax.io import hf
from glm_jax.learn.config import LearnConfig
from glm_jax.model.config import ModelConfig
from glm_jax.program.round import Program, build
from glm_jax.program.state import RunState
from glm_jax.rollout.strings import StopStrings
from glm_jax.sharding.mesh import make_mesh


def model_config(config: RunConfig, tokenizer: Tokenizer) -> ModelConfig:
    """The architecture; a preset gets the tokenizer's vocabulary. Raises RunError where the two do not agree."""
    source = config.model
    if source.path is not None:
        model = hf.read_config(Path(source.path))
    else:
        model = source.of_preset(vocab_size=tokenizer.vocab_size)
    check_vocabulary("the model", model, tokenizer)
    drafting = {"rollout.drafts": config.rollout.drafts, "learn.draft_depth": config.learn.draft_depth}
    if not model.num_nextn_predict_layers and (asked := {k: v for k, v in drafting.items() if v}):
        raise RunError(
            f"the model has no draft layer (num_nextn_predict_layers = 0), and {asked} want one: set them to () and 0, "
            "or model.changes.num_nextn_predict_layers to 1"
        )
    return model


def model_of(config: RunConfig) -> ModelConfig:
    """The architecture with the vocabulary that its preset has: for accounts of runs that nobody starts here."""
    source = config.model
    return hf.read_config(Path(source.path)) if source.path else source.of_preset()


def check_vocabulary(name: str, model: ModelConfig, tokenizer: Tokenizer) -> None:
    """Raises RunError where the model samples what the tokenizer cannot read, or cannot read what it writes."""
    if not tokenizer.fits(model.vocab_size):
        raise RunError(
            f"{name} has {model.vocab_size} token ids and the tokenizer {tokenizer.vocab_size}: what it samples "
            "could not be read. Use a model of the tokenizer's vocabulary."
        )


def make_program(config: RunConfig, model: ModelConfig, learn: LearnConfig | None = None) -> Program:
    """The program of a run; nothing is compiled yet."""
    return build(model, config.rollout, learn or config.learn, make_mesh(config.mesh))


def first_state(program: Program, config: RunConfig) -> RunState:
    """The state that a run starts from: new weights, or those of its model folder."""
    state = program.init(config.seed)
    if config.model.path is None:
        return state
    _, params = hf.load(config.model.path, shardings=program.shardings.policy.params)
    return with_policy(program, state, params)


def with_policy(program: Program, state: RunState, params: Any) -> RunState:
    """The state with other weights of the policy, and where there is a critic, one made from them."""
    placed = jax.device_put(params, program.shardings.policy.params)
    state = state.replace(policy=state.policy.replace(params=placed))
    return state if state.critic is None else program.start_critic(state)


def policy_target(program: Program) -> Any:
    """Shapes, dtypes and places of the policy's parameters, for a restore."""
    shapes = jax.eval_shape(program.init, 0).policy.params
    place = lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
    return jax.tree.map(place, shapes, program.shardings.policy.params)


def check_prompts(tasks: Sequence[Task], tokenizer: Tokenizer, window: int) -> None:
    """Raises RunError for a prompt that leaves no room for a token within the window."""
    sizes = [len(tokenizer.encode(task.question)) for task in tasks]
    long = [(size, task.id) for size, task in zip(sizes, tasks, strict=True) if size >= window]
    if long:
        size, name = max(long)
        raise RunError(
            f"{len(long)} of {len(tasks)} prompts leave no room for an answer in rollout.window = {window} tokens; the "
            f"longest has {size} ({name}). Raise rollout.window, or choose shorter tasks."
        )
    if empty := [task.id for size, task in zip(sizes, tasks, strict=True) if size == 0]:
        raise RunError(f"{len(empty)} prompts are empty, the first is {empty[0]!r}; a prompt needs at least one token.")


def make_sampling(
    config: RunConfig,
    program: Program,
    state: RunState,
    ledger: Ledger,
    pool: RewardPool | Pool,
    tasks: Sequence[Task],
    tokenizer: Tokenizer,
    peers: Peers = ALONE,
) -> Sampling:
    """The desk between ledger, device and rewards."""
    device = Device(program, state, config.rollout, config.shape, config.patience, config.deterministic, peers)
    environments = None
    if isinstance(pool, Pool):
        calls.check(tokenizer)
        environments = Environments(pool, ledger, tokenizer, playground.places(tasks), config.tools)
    scorer = Scorer(ledger, environments or pool, tokenizer.decode, {task.id: task for task in tasks})
    draw = Draw(
        window=config.rollout.window,
        temperature=config.rollout.temperature,
        top_p=config.rollout.top_p,
        stop=tokenizer.stop_ids,
        tokens=config.limits.tokens,
        strings=StopStrings(config.limits.strings, tokenizer.decode) if config.limits.strings else None,
    )
    return Sampling(ledger, device, scorer, tokenizer.encode, draw, environments, peers)


def make_pool(config: RunConfig, peers: Peers = ALONE) -> RewardPool | Pool:
    """The worker processes that compute rewards, or that serve environments; with peers, this host's share of them."""
    make = Pool if peers.count == 1 else partial(Divided, peers=peers)
    if config.tasks.source == playground.ENVIRONMENTS:
        tools, remedy = config.tools, "environments run in boxes of bubblewrap"
        serve = "glm_jax.envs.attempts:serve"
        return make(serve, tools.workers, tools.at_once, noun="environment", remedy=remedy)
    reward = config.reward
    return RewardPool(config.tasks.reward, reward.workers, reward.time_limit, (reward.low, reward.high), make)


def without_critic(learn: LearnConfig) -> LearnConfig:
    """For programs that only sample."""
    return dataclasses.replace(learn, advantage="running_mean")
