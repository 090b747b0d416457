"""The real round of a config as abstract values: what would be allocated and compiled, and nothing of it made."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.extend import core

from glm_jax.host.compose import model_of
from glm_jax.host.config import RunConfig
from glm_jax.learn.accumulate import Setup, micro
from glm_jax.learn.batch import RL, empty_batch
from glm_jax.learn.forward import token_logp
from glm_jax.program.exchange import Inbox
from glm_jax.program.round import Program, build
from glm_jax.program.state import RunState
from glm_jax.rollout.pages import no_offer
from glm_jax.rollout.requests import empty_requests
from glm_jax.sharding import layout
from glm_jax.sharding.mesh import make_mesh


def program_of(config: RunConfig, devices: Sequence[jax.Device]) -> Program:
    return build(model_of(config), config.rollout, config.learn, make_mesh(config.mesh, devices))


def arguments(program: Program, config: RunConfig) -> tuple[RunState, Inbox]:
    """Shapes, dtypes and places of what a round is given."""
    place = lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
    state = jax.tree.map(place, jax.eval_shape(program.init, 0), program.shardings)
    whole = layout.replicated(program.mesh)
    return state, jax.tree.map(lambda x: place(x, whole), inbox(config, program.shards))


def inbox(config: RunConfig, shards: int) -> Inbox:
    """An inbox of a run's sizes, with nothing in it."""
    rollout = config.rollout
    return Inbox(
        requests=empty_requests(rollout.requests, rollout.window, rollout.per_slot),
        cancel=np.full(rollout.requests, -1, np.int32),
        batch=empty_batch(*config.shape),
        mode=np.int32(RL),
        policy_lr=np.float32(0),
        critic_lr=np.float32(0),
        depth=np.int32(max(rollout.drafts, default=0)),
        offer=no_offer(rollout.pool, shards) if rollout.page else None,
    )


def state_bytes(state: RunState) -> dict[str, int]:
    """Of one device, by part. Slots and queue count to the caches."""
    parts: dict[str, Any] = {"weights": state.policy.params, "optimizer": state.policy.opt_state}
    parts["critic"] = state.critic
    parts["caches"] = state.sampler
    return {name: sum(map(on_one_device, jax.tree.leaves(tree))) for name, tree in parts.items()}


def on_one_device(leaf: jax.ShapeDtypeStruct) -> int:
    return int(np.prod(leaf.sharding.shard_shape(leaf.shape))) * leaf.dtype.itemsize


def activation_bytes(program: Program, config: RunConfig, remat: bool = False) -> int:
    """Of one device: what the policy's forward pass keeps of a micro-batch for its backward pass.

    By the traced program's shapes, parameters apart, divided evenly among the devices that split the rows and their
    columns; with `remat` as if the model recomputed its layers.
    """
    model = dataclasses.replace(program.model, remat=program.model.remat or remat)
    setup = Setup(model, config.learn, config.rollout.temperature, config.rollout.top_p)
    params = jax.eval_shape(program.init, 0).policy.params
    batch = jax.eval_shape(lambda b: micro(b, 0), empty_batch(*config.shape))

    def kept(params, tokens, documents):
        temperatures = setup.temperature, setup.top_p
        f = lambda p: token_logp(p, setup.model, tokens, documents, *temperatures)[0]
        return jax.tree.leaves(jax.vjp(f, params)[1])

    with layout.tracing_for(program.mesh):
        jaxpr = jax.make_jaxpr(kept)(params, batch.tokens, batch.document_ids).jaxpr
    made = {v for v in jaxpr.outvars if isinstance(v, core.Var)} - set(jaxpr.invars)
    return sum(v.aval.size * v.aval.dtype.itemsize for v in made) // config.mesh.slots
