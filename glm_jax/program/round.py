"""The program of a run: one jitted round that samples, learns and hands the weights over."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from glm_jax.learn import optimizer
from glm_jax.learn.accumulate import Setup, zeros
from glm_jax.learn.batch import IDLE, RL, SFT
from glm_jax.learn.config import LearnConfig
from glm_jax.learn.optimizer import DRAFT, INDEXER, MAIN, Learner
from glm_jax.learn.update import learn, metric_names
from glm_jax.model import weights
from glm_jax.model.config import ModelConfig
from glm_jax.model.weights import Transformer
from glm_jax.program.exchange import Inbox, Outbox, PageNews
from glm_jax.program.state import RunState
from glm_jax.rollout import admission, sampler, slots
from glm_jax.rollout.config import RolloutConfig
from glm_jax.sharding import layout, manual
from glm_jax.sharding.checksum import checksum
from glm_jax.sharding.handoff import handoff
from glm_jax.sharding.mesh import LayoutError


def run_round(
    state: RunState, inbox: Inbox, setup: Setup, rollout: RolloutConfig, mesh: Mesh, learns: bool = True
) -> tuple[RunState, Outbox]:
    """Admit, hand over, sample, learn. Tokens of a round carry the version before that round's update.

    After an update live rollouts go on from the rows that older weights wrote, or from rows written anew.

    Without `learns` (static) the inbox's batch is not looked at.
    """
    device = admission.begin(admission.cancel(state.sampler, inbox.cancel), inbox.offer)
    device = admission.send(device, inbox.requests)
    version, seed = state.policy.version, state.seed
    with jax.named_scope("handoff"):
        view = handoff(state.policy.params, setup.model, mesh)
        seen = jnp.stack([checksum(state.policy.params), checksum(view)])
    with jax.named_scope("sample"):
        device, log, usage = sampler.run(view, setup.model, rollout, device, version, seed, inbox.depth)

    split = lambda a: jax.lax.with_sharding_constraint(a, layout.rows(mesh, 1)) if a.ndim else a
    batch = jax.tree.map(split, inbox.batch)

    def step(learners):
        policy, critic = learners
        policy, critic, metrics = learn(policy, critic, batch, inbox.mode, inbox.policy_lr, inbox.critic_lr, setup)
        return (policy, critic), metrics

    learners = (state.policy, state.critic)
    names = metric_names(critic=state.critic is not None, drafting=setup.learn.draft_depth > 0)
    skip = lambda learners: (learners, zeros(names))
    if learns:
        with jax.named_scope("learn"):
            learners, metrics = jax.lax.cond(inbox.mode != IDLE, step, skip, learners)
    else:
        learners, metrics = skip(learners)
    updated = (inbox.mode == SFT) | (inbox.mode == RL)
    device = admission.outdate(device, updated, rewrite=rollout.on_update == "recompute")
    metrics = metrics | {f"sample/{k}": v.astype(jnp.float32) for k, v in dataclasses.asdict(usage).items()}
    metrics["sample/ticks"] = log.ticks.astype(jnp.float32)
    if device.pages is not None:
        metrics["sample/retracted"] = jnp.sum(device.pages.retracted).astype(jnp.float32)
    news = device.pages and PageNews(device.pages.news, device.pages.lost)
    return RunState(*learners, device, state.seed), Outbox(log, device.queue.requests.count, metrics, seen, news)


@dataclasses.dataclass(frozen=True)
class Program:
    """The jitted functions of a run, all over one mesh."""

    model: ModelConfig
    mesh: Mesh
    shards: int  # devices that each sample for themselves
    shardings: RunState  # of the state, leaf by leaf
    init: Callable[[int], RunState]
    round: Callable[[RunState, Inbox], tuple[RunState, Outbox]]  # the state is donated
    sample: Callable[[RunState, Inbox], tuple[RunState, Outbox]]  # a round that never learns: quicker to compile
    start_critic: Callable[[RunState], RunState]  # a new critic from the policy as it is now
    reset_sampler: Callable[[RunState], RunState]  # empties slots and queue: in-flight work must be sent again


def build(
    model: ModelConfig,
    rollout: RolloutConfig,
    config: LearnConfig,
    mesh: Mesh,
    params: Transformer | None = None,
) -> Program:
    """The program of a run. `params` are the policy's first weights; without them `init` draws them from the seed."""
    setup = Setup(model, config, rollout.temperature, rollout.top_p)
    with layout.tracing_for(mesh):
        shards = manual.ways()
    layout.check_stages(model, mesh)
    _check_rows(rollout, config, mesh, shards)

    def new_policy(seed):
        start = params if params is not None else weights.init(model, jax.random.key(seed))
        parts = (MAIN, *([INDEXER] if config.indexer_kl > 0 else []), *([DRAFT] if config.draft_depth else []))
        return optimizer.init(start, optimizer.labels(start), config.policy, parts)

    def new_critic(policy: Learner) -> Learner | None:
        if config.advantage != "sao":
            return None
        start = weights.critic_from_policy(policy.params, model)
        names = optimizer.labels(start, config.freeze_critic_attention)
        return optimizer.init(start, names, config.critic, (MAIN,))

    def new_sampler():
        with layout.tracing_for(mesh):
            return slots.init(model, rollout)

    def init(seed) -> RunState:
        policy = new_policy(seed)
        return RunState(policy, new_critic(policy), new_sampler(), jnp.asarray(seed, jnp.int32))

    shardings = _state_shardings(jax.eval_shape(init, 0), model, mesh)
    to_state = partial(jax.jit, donate_argnums=0, out_shardings=shardings)

    def rounds(learns: bool):
        def run(state, inbox):
            with layout.tracing_for(mesh):
                return run_round(state, inbox, setup, rollout, mesh, learns)

        return jax.jit(run, donate_argnums=0, out_shardings=(shardings, layout.replicated(mesh)))

    return Program(
        model=model,
        mesh=mesh,
        shards=shards,
        shardings=shardings,
        init=jax.jit(init, out_shardings=shardings),
        round=rounds(learns=True),
        sample=rounds(learns=False),
        start_critic=to_state(lambda state: state.replace(critic=new_critic(state.policy))),
        reset_sampler=to_state(lambda state: state.replace(sampler=new_sampler())),
    )


def _check_rows(rollout: RolloutConfig, config: LearnConfig, mesh: Mesh, shards: int) -> None:
    sizes = {
        "rollout.slots": (rollout.slots, layout.SLOTS),
        "learn.rows": (config.rows, layout.ROWS),
        "learn.length": (config.length, (layout.COLUMNS,)),
    }
    for name, (size, axes) in sizes.items():
        ways = math.prod(mesh.shape[axis] for axis in axes)
        if size % ways:
            over = " × ".join(axes)
            raise LayoutError(f"{name}={size} does not divide over {over} = {ways} devices: change it or the mesh")
    if not rollout.page:
        return
    if shards != math.prod(mesh.shape[axis] for axis in layout.SLOTS):
        raise LayoutError(f"rollout.page={rollout.page}: caches have no pages where a tensor axis splits the model")
    if rollout.pool % shards or rollout.pool // shards < rollout.per_slot:
        raise LayoutError(
            f"rollout.pages={rollout.pool} on {shards} devices: each wants the same whole number of them, and at least "
            f"{rollout.per_slot}, which hold a rollout of window={rollout.window} tokens"
        )


def _state_shardings(state: RunState, model: ModelConfig, mesh: Mesh) -> RunState:
    """Parameters and everything shaped like them in the learning layout, caches and slots by rows, the rest whole."""
    whole = layout.replicated(mesh)

    def learner(shapes: Learner | None, critic: bool) -> Learner | None:
        if shapes is None:
            return None
        params = layout.shardings(weights.abstract(model, critic), layout.LEARN, mesh)
        by_path = {jax.tree_util.keystr(p): s for p, s in jax.tree_util.tree_leaves_with_path(params)}

        def of(path, leaf):
            # A moment's path ends with its parameter's.
            text = jax.tree_util.keystr(path)
            return next((s for p, s in by_path.items() if text.endswith(p) and leaf.ndim), whole)

        opt_state = jax.tree_util.tree_map_with_path(of, shapes.opt_state)
        return Learner(params, opt_state, whole)

    def by_slot(tree, dimension: int):
        return jax.tree.map(lambda _: layout.slots(mesh, dimension), tree)

    drafting = state.sampler.drafting
    alone = state.sampler.queue.head.size > 1  # each device samples for itself
    return RunState(
        policy=learner(state.policy, critic=False),
        critic=learner(state.critic, critic=True),
        sampler=state.sampler.replace(
            slots=by_slot(state.sampler.slots, 0),
            queue=by_slot(state.sampler.queue, 0) if alone else jax.tree.map(lambda _: whole, state.sampler.queue),
            pages=by_slot(state.sampler.pages, 0),
            caches=by_slot(state.sampler.caches, 1),
            drafting=drafting
            and drafting.replace(
                caches=by_slot(drafting.caches, 1),
                hidden=by_slot(drafting.hidden, 0),
                pending=by_slot(drafting.pending, 0),
            ),
        ),
        seed=whole,
    )
