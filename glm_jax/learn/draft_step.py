"""The draft layer's update, on states of a frozen backbone: cross-entropy, or what verification would refuse.

With target p and draft q, rejection sampling keeps the draft at depth j with probability α_j = Σ_v min(p_j(v), q_j(v)),
which is 1 - TV(p_j, q_j), if all before it were kept. The end-to-end loss is one minus the mean share of γ drafts kept:

    L = 1 - (1/γ) Σ_{j=1..γ} Π_{i≤j} α_i          ∂(1 - α)/∂logit_v = -q_v (1[q_v ≤ p_v] - S),  S = Σ_{v: q_v ≤ p_v} q_v

Source: the end-to-end TV loss of Bebop, by way of GLM-5.2's report.
"""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from glm_jax.learn import masked, optimizer
from glm_jax.learn.accumulate import Setup, accumulate, micro, zeros
from glm_jax.learn.batch import LearnBatch
from glm_jax.learn.forward import LOGITS_AT_ONCE
from glm_jax.learn.optimizer import DRAFT, Learner
from glm_jax.model import context, draft
from glm_jax.model.chunks import chunked
from glm_jax.model.heads import unembed
from glm_jax.model.norms import wide
from glm_jax.model.transformer import hidden_states
from glm_jax.sharding import layout
from glm_jax.sharding.manual import each_on_its_rows

METRICS = (
    "draft/loss",
    "draft/grad_norm",
    "draft/overlap",  # mean of α over depths
    "draft/length",  # 1 + Σ_j Π_{i≤j} α_i: tokens that a pass would sample at temperature 1
)
_COUNT = "count"


def update(
    policy: Learner, batch: LearnBatch, lr: Float[Array, ""], setup: Setup, kind: Literal["tv", "ce"]
) -> tuple[Learner, dict[str, Float[Array, ""]]]:
    """One optimiser step of the draft layer (its indexer by its own loss); the rest of the model stays as it is."""

    def loss(layer, i):
        b = micro(batch, i)
        return _loss(policy.params.replace(draft=layer), b.tokens, b.document_ids, b.trainable, setup, kind)

    nothing = jax.tree.map(jnp.zeros_like, policy.params.draft), zeros((_COUNT, *METRICS))
    grads, sums = accumulate(batch.used, lambda i: jax.grad(loss, has_aux=True)(policy.params.draft, i), nothing)
    count = jnp.maximum(sums.pop(_COUNT), 1.0)
    grads = jax.tree.map(lambda g: g / count.astype(g.dtype), grads)
    whole = jax.tree.map(jnp.zeros_like, policy.params).replace(draft=grads)
    names = optimizer.labels(policy.params)
    metrics = {k: v / count for k, v in sums.items()}
    policy, metrics["draft/grad_norm"] = optimizer.step(policy, whole, names, setup.learn.policy, lr, (DRAFT,))
    return policy, {k: v.astype(jnp.float32) for k, v in metrics.items()}


def _loss(params, tokens: Int[Array, "R C"], document_ids: Int[Array, "R C"], trainable, setup: Setup, kind: str):
    """Sum over the states from which all depths are labelled with trainable tokens, and figures summed likewise."""
    model, depth = setup.model, setup.learn.draft_depth
    train_indexer = setup.learn.indexer_kl > 0

    def run(params, tokens, document_ids, trainable):
        hidden = jax.lax.stop_gradient(hidden_states(params, model, tokens, document_ids)[0])
        drafted, kl = draft.unroll(params, model, tokens, hidden, document_ids, depth, train_indexer)

        def of_columns(args):
            """Overlap and cross-entropy [R, C, depth] of all drafts of the token that follows a column."""
            hidden, drafted, following = args
            target = jax.lax.stop_gradient(jax.nn.softmax(unembed(params, hidden).astype(wide(hidden.dtype))))
            log_q = [jax.nn.log_softmax(unembed(params, m).astype(target.dtype)) for m in drafted]
            said = [jnp.take_along_axis(each, following[..., None], axis=-1)[..., 0] for each in log_q]
            return jnp.stack([_overlap(target, each) for each in log_q], -1), -jnp.stack(said, -1)

        # The draft of depth j from column c is of token c + 2 + j, which the target predicts at column c + 1 + j.
        drafted = [context.moved(m, step + 1) for step, m in enumerate(drafted)]
        at_once = max(1, LOGITS_AT_ONCE // ((depth + 1) * tokens.shape[0] * model.vocab_size))
        found = chunked(of_columns, (hidden, drafted, context.own(_left(tokens, 1))), at_once)
        from_state = lambda x: jnp.stack([_left(x[..., step], step + 1) for step in range(depth)])
        alpha, cross_entropy = (from_state(context.whole(x)) for x in found)
        kept = jnp.sum(jnp.cumprod(alpha, axis=0), axis=0)
        total = jnp.mean(cross_entropy, axis=0) if kind == "ce" else 1.0 - kept / depth
        counted = labelled(document_ids, trainable, depth)
        sums = [masked.total(x, counted) for x in (total, jnp.mean(alpha, axis=0), 1.0 + kept)]
        seen = [jnp.sum(counted), jnp.sum(document_ids > 0), context.total(kl)]
        return jnp.stack([x.astype(kl.dtype) for x in (*sums, *seen)])[None]

    on_rows = each_on_its_rows(run, params, model, layout.LEARN, (0, 0, 0), 0)
    total, overlap, length, count, held, kl = jnp.sum(on_rows(tokens, document_ids, trainable), axis=0)
    seen = {"draft/loss": total, "draft/overlap": overlap, "draft/length": length, _COUNT: count}
    seen["draft/grad_norm"] = jnp.zeros(())
    # The indexer learns from every token, as in SFT.
    objective = total + setup.learn.indexer_kl * kl * count / jnp.maximum(held, 1)
    return objective, {k: jax.lax.stop_gradient(v).astype(jnp.float32) for k, v in seen.items()}


def labelled(document_ids: Int[Array, "R C"], trainable: Bool[Array, "R C"], depth: int) -> Bool[Array, "R C"]:
    """Columns whose `depth` drafts, of the tokens two columns on and further, all have a trainable label."""
    held = document_ids > 0
    for step in range(depth):
        same = _left(document_ids, step + 2) == document_ids
        held = held & same & _left(trainable, step + 2)
    return held


def _overlap(p: Float[Array, "R C V"], log_q: Float[Array, "R C V"]) -> Float[Array, "R C"]:
    q = jnp.exp(log_q)
    return jnp.sum(jnp.where(q <= p, q, p), axis=-1)


def _left(x: Float[Array, "R C *D"], by: int) -> Float[Array, "R C *D"]:
    """Moves each column to the left: what stood at column j + by stands at j; zeros come in."""
    return jnp.pad(x[:, by:], [(0, 0), (0, by)] + [(0, 0)] * (x.ndim - 2))
