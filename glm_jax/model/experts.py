"""The routed experts' MLPs: each token visits its k experts, and only those are computed.

On a CPU, tokens are laid out expert by expert in blocks (a counting sort by cumulative sum, no sort) and a loop runs
over the blocks in use, so its cost follows k, not E; a few tokens, no more than a block, go to their experts as they
are. Elsewhere the same layout with blocks of one row feeds `jax.lax.ragged_dot`.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from glm_jax.model.norms import linear
from glm_jax.model.quantised import Quantised, dense
from glm_jax.model.target import on_cpu

FEW = 8  # tokens: of up to so many no block is made on a CPU


class Layout(NamedTuple):
    """Where each (token, expert) pair stands among P rows, in which each expert's rows start at a block boundary."""

    place: Int[Array, "N k"]  # row of the pair; P if the token is not valid
    token: Int[Array, "P"]  # the row's token; N where the row is empty
    pair: Int[Array, "P"]  # the row's pair, N·k where empty
    expert: Int[Array, "P/block"]  # of each block
    used: Int[Array, ""]  # blocks in use
    count: Int[Array, "E"]  # pairs of each expert


def routed_mlp(
    x: Float[Array, "N D"],
    expert: Int[Array, "N k"],
    weight: Float[Array, "N k"],
    valid: Bool[Array, "N"],
    gate_up: Float[Array, "E D 2 I"] | Quantised,
    down: Float[Array, "E I D"] | Quantised,
) -> Float[Array, "N D"]:
    """Σ_i weight_i · MLP_{expert_i}(x), zero for tokens that are not valid."""
    experts = gate_up.shape[0]
    on_the_way = on_cpu() and isinstance(gate_up, Quantised)  # each expert is widened when it is visited
    if not on_the_way:
        gate_up = dense(gate_up, x.dtype).reshape(*gate_up.shape[:2], -1)
        down = dense(down, x.dtype)
    if on_cpu():
        arguments = (x, expert, weight, valid, gate_up, down)
        return (_blocked_mlp if on_the_way else _blocked)(*arguments)
    plan = layout(expert, valid, experts, 1)
    hidden = jax.lax.ragged_dot(take_rows(x, plan.token), gate_up, plan.count)
    gate, up = jnp.split(hidden, 2, axis=-1)
    return combine(jax.lax.ragged_dot(jax.nn.silu(gate) * up, down, plan.count), weight, plan.place)


def _of(e, *weights):
    """Expert e's."""
    return jax.tree.map(lambda a: a[e], weights)


def _mlp(x: Float[Array, "n D"], gate_up, down):
    """An expert's MLP of a few rows, and its products before silu."""
    hidden = linear(x, gate_up).reshape(x.shape[0], -1)
    gate, up = jnp.split(hidden, 2, axis=-1)
    return linear(jax.nn.silu(gate) * up, down), hidden


def _few_tokens(x, expert, weight, valid, gate_up, down):
    """Experts run all of a few tokens: no more rows than a block, and nothing is sorted."""
    (tokens, k), experts = expert.shape, down.shape[0]
    all_of_them = experts <= (tokens + 1) * k and not isinstance(down, Quantised)
    if tokens == 1 and not all_of_them:
        mlps = [weight[:, i, None].astype(x.dtype) * _mlp(x, *_of(expert[0, i], gate_up, down))[0] for i in range(k)]
        return jnp.where(valid[:, None], sum(mlps), 0)
    goes = (expert[..., None] == jnp.arange(experts)) & valid[:, None, None]
    share_ExN = jnp.sum(jnp.where(goes, weight[..., None], 0), axis=1).T.astype(x.dtype)
    if all_of_them:
        # Most are visited, and one product over all of them copies no weights.
        hidden = jnp.einsum("end,edf->enf", jnp.broadcast_to(x, (experts, *x.shape)), gate_up)
        gate, up = jnp.split(hidden, 2, axis=-1)
        y = jnp.einsum("enf,efd->end", jax.nn.silu(gate) * up, down)
        return jnp.sum(jnp.where(share_ExN[..., None] == 0, 0, share_ExN[..., None] * y), axis=0)
    visited = jnp.any(goes, axis=(0, 1))
    order = jnp.argsort(~visited)

    def body(i, out):
        own = share_ExN[order[i], :, None]
        return out + jnp.where(own == 0, 0, own * _mlp(x, *_of(order[i], gate_up, down))[0])

    return jax.lax.fori_loop(0, jnp.sum(visited), body, jnp.zeros_like(x))


def block_size(expert, experts: int) -> int:
    """Rows of a block: about half of what an expert gets on average, between 8 and 128."""
    mean = expert.size // experts
    return min(128, max(8, 1 << (max(mean, 2) - 1).bit_length() - 1))


def layout(expert: Int[Array, "N k"], valid: Bool[Array, "N"], experts: int, block: int) -> Layout:
    """Counting sort of the pairs by expert, each expert padded to whole blocks."""
    tokens, k = expert.shape
    blocks_max = -(-tokens * k // block) + (experts if block > 1 else 0)
    rows = blocks_max * block
    flat = expert.reshape(-1)
    one_hot = (flat[:, None] == jnp.arange(experts)) & jnp.repeat(valid, k)[:, None]
    running = jnp.cumsum(one_hot.astype(jnp.int32), axis=0)
    rank = jnp.take_along_axis(running, flat[:, None], axis=1)[:, 0] - 1
    count = running[-1]
    blocks = -(-count // block)
    last = jnp.cumsum(blocks)
    place = jnp.where(jnp.repeat(valid, k), (last - blocks)[flat] * block + rank, rows)
    pair = jnp.full((rows,), tokens * k, jnp.int32).at[place].set(jnp.arange(tokens * k, dtype=jnp.int32), mode="drop")
    of_block = jnp.minimum(jnp.sum(last[None] <= jnp.arange(blocks_max)[:, None], axis=1), experts - 1)
    return Layout(place.reshape(tokens, k), pair // k, pair, of_block, last[-1], count)


def take_rows(x, token):
    """Rows of x; zeros for those beyond it."""
    return jnp.take(x, token, axis=0, mode="fill", fill_value=0)


def combine(y: Float[Array, "P D"], weight, place: Int[Array, "N k"]) -> Float[Array, "N D"]:
    """Σ_i weight_i · y[place_i], 0 for places beyond y: a gather per pair, no scatter."""
    out = 0.0
    for i in range(weight.shape[1]):
        out = out + weight[:, i, None].astype(y.dtype) * take_rows(y, place[:, i])
    return out


def _blocked_mlp(x, expert, weight, valid, gate_up, down):
    if x.shape[0] <= FEW:
        return _few_tokens(x, expert, weight, valid, gate_up, down)
    plan = _blocks(expert, valid, down)
    return combine(_blocked_rows(x, gate_up, down, plan, keep_hidden=False)[0], weight, plan.place)


def _blocks(expert, valid, down) -> Layout:
    experts = down.shape[0]
    return layout(expert, valid, experts, block_size(expert, experts))


_blocked = jax.custom_vjp(_blocked_mlp)


def _blocked_rows(x, gate_up, down, plan: Layout, keep_hidden: bool):
    """The MLP of every row in use, block by block; with `keep_hidden` also the products before silu."""
    blocks = plan.expert.shape[0]
    token = plan.token.reshape(blocks, -1)

    def one_expert(carry):
        first, *_ = carry
        e = plan.expert[first]
        own = _of(e, gate_up, down)  # a copy: one for all of its blocks

        def one_block(carry):
            i, y, hidden = carry
            out, h = _mlp(take_rows(x, token[i]), *own)
            return i + 1, y.at[i].set(out), hidden.at[i].set(h) if keep_hidden else hidden

        return jax.lax.while_loop(lambda c: (c[0] < plan.used) & (plan.expert[c[0]] == e), one_block, carry)

    y = jnp.zeros((*token.shape, x.shape[1]), x.dtype)
    hidden = jnp.zeros((*token.shape, 2 * down.shape[1]), x.dtype) if keep_hidden else None
    _, y, hidden = jax.lax.while_loop(lambda c: c[0] < plan.used, one_expert, (jnp.int32(0), y, hidden))
    return y.reshape(-1, x.shape[1]), hidden


def _blocked_fwd(x, expert, weight, valid, gate_up, down):
    plan = _blocks(expert, valid, down)
    y, hidden = _blocked_rows(x, gate_up, down, plan, keep_hidden=True)
    return combine(y, weight, plan.place), (x, weight, gate_up, down, plan, y, hidden)


def _blocked_bwd(residuals, d_out):
    """Hand-written: autodiff of a loop that slices weights would add a whole weight tensor per block."""
    x, weight, gate_up, down, plan, y, hidden = residuals
    d_weight = jnp.stack(
        [jnp.sum(d_out * take_rows(y, plan.place[:, i]), axis=-1) for i in range(weight.shape[1])], axis=1
    ).astype(weight.dtype)
    blocks = plan.expert.shape[0]
    token = plan.token.reshape(blocks, -1)
    row_weight = take_rows(weight.reshape(-1), plan.pair).reshape(blocks, -1).astype(x.dtype)

    def body(i, carry):
        d_x, d_gate_up, d_down = carry
        e = plan.expert[i]
        d_y = row_weight[i][:, None] * take_rows(d_out, token[i])
        act, silu_vjp = jax.vjp(lambda gate, up: jax.nn.silu(gate) * up, *jnp.split(hidden[i], 2, axis=-1))
        d_h = jnp.concatenate(silu_vjp(d_y @ down[e].T), axis=-1)
        d_down = d_down.at[e].add(act.T @ d_y)
        d_gate_up = d_gate_up.at[e].add(take_rows(x, token[i]).T @ d_h)
        return d_x.at[i].set(d_h @ gate_up[e].T), d_gate_up, d_down

    carry = (jnp.zeros((*token.shape, x.shape[1]), x.dtype), jnp.zeros_like(gate_up), jnp.zeros_like(down))
    d_rows, d_gate_up, d_down = jax.lax.fori_loop(0, plan.used, body, carry)
    d_rows = d_rows.reshape(-1, x.shape[1])
    d_x = sum(take_rows(d_rows, plan.place[:, i]) for i in range(weight.shape[1]))
    return d_x, None, d_weight, None, d_gate_up, d_down


_blocked.defvjp(_blocked_fwd, _blocked_bwd)
