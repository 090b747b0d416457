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
from glm_jax.model import draft
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
        counted = labelled(document_ids, trainable, depth)

        def of_rows(args):
            hidden, drafted, tokens, counted = args
            target = jax.lax.stop_gradient(jax.nn.log_softmax(unembed(params, hidden).astype(wide(hidden.dtype))))
            kept, total, overlap, length = 1.0, 0.0, 0.0, 1.0
            for step in range(depth):
                log_q = jax.nn.log_softmax(unembed(params, drafted[:, step]).astype(target.dtype))
                alpha = _overlap(jnp.exp(_left(target, step + 1)), log_q)
                kept = kept * alpha
                overlap, length = overlap + alpha / depth, length + kept
                label = _left(tokens, step + 2)[..., None]
                total = total - jnp.take_along_axis(log_q, label, axis=-1)[..., 0] / depth
            total = total if kind == "ce" else 1.0 - (length - 1.0) / depth
            return jnp.stack([masked.total(x, counted) for x in (total, overlap, length)])

        args = (hidden, drafted.swapaxes(0, 1), tokens, counted)
        if 2 * tokens.size * model.vocab_size <= LOGITS_AT_ONCE:
            sums = of_rows(args)
        else:
            one = lambda a: of_rows(jax.tree.map(lambda x: x[None], a))
            sums = jnp.sum(jax.lax.map(jax.checkpoint(one), args), axis=0)
        seen = jnp.stack([jnp.sum(counted), jnp.sum(document_ids > 0)]).astype(sums.dtype)
        return jnp.concatenate([sums, seen, kl[None]])[None]

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
