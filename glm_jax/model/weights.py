"""The weights of a model: one declared tree, its initial values, and the same layers stacked or one by one."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array

from glm_jax.model import attention, tree
from glm_jax.model.attention import Attention
from glm_jax.model.config import ModelConfig
from glm_jax.model.moe import Mlp, Moe, init_mlp, init_moe
from glm_jax.model.schedule import LayerKind
from glm_jax.model.target import on_cpu, target
from glm_jax.model.tree import Leaf

DRAFT_KIND = LayerKind(full=True, sparse=True)


@struct.dataclass
class Layer:
    attn_norm: Array  # [D]
    attn: Attention
    mlp_norm: Array  # [D]
    mlp: Mlp | Moe


@struct.dataclass
class Draft:
    """The draft (MTP) layer: a sparse layer with its own indexer, and how a token and a state become its input."""

    embed_norm: Array  # [D]
    hidden_norm: Array  # [D]
    proj: Array  # [2 D, D]: of the normed embedding, then of the normed state
    layer: Layer
    norm: Array  # [D]


@struct.dataclass
class Transformer:
    """Parameters of a policy (`head`) or of a critic (`value`, no `head`, no `draft`), else the same tree.

    `groups[g][i]` is layer i of group g's pattern, stacked over the group's repeats (no stack where it repeats once).
    """

    embed: Array  # [V, D]
    groups: tuple[tuple[Layer, ...], ...]
    norm: Array  # [D]
    head: Array | None  # [D, V]; None when tied, and in a critic
    value: Array | None  # [D + 1]: weights and bias of the value head, in a critic
    draft: Draft | None  # where the model has one


def declare_layer(config: ModelConfig, kind: LayerKind) -> Layer:
    """One layer's parameters."""
    dim = config.hidden_size
    return Layer(
        attn_norm=Leaf((dim,), (None,), value=1.0),
        attn=attention.init(config, kind.full),
        mlp_norm=Leaf((dim,), (None,), value=1.0),
        mlp=init_moe(config) if kind.sparse else init_mlp(dim, config.intermediate_size),
    )


def abstract(config: ModelConfig, critic: bool = False) -> Transformer:
    """Every parameter declared (shape, logical axes, initialiser)."""
    dim, vocab = config.hidden_size, config.vocab_size

    def draft() -> Draft:
        norm = Leaf((dim,), (None,), value=1.0)
        proj = Leaf((2 * dim, dim), (None, "embed"), 2 * dim)
        return Draft(embed_norm=norm, hidden_norm=norm, proj=proj, layer=declare_layer(config, DRAFT_KIND), norm=norm)

    return Transformer(
        embed=Leaf((vocab, dim), ("vocab", "embed"), dim),
        groups=tuple(
            tuple(
                tree.stack(declare_layer(config, k), g.repeats, "stage" if i == config.staged else "layer")
                for k in g.pattern
            )
            for i, g in enumerate(config.groups)
        ),
        norm=Leaf((dim,), (None,), value=1.0),
        head=None if critic or config.tie_word_embeddings else Leaf((dim, vocab), ("embed", "vocab"), dim),
        value=Leaf((dim + 1,), (None,)) if critic else None,
        draft=None if critic or not config.num_nextn_predict_layers else draft(),
    )


def declared(params: Transformer, config: ModelConfig) -> Transformer:
    """The declarations of these parameters, in the form that they have: a critic's or not, stacked or one by one."""
    leaves = abstract(config, critic=params.value is not None)
    if len(params.groups) == len(config.groups):
        return leaves
    one_by_one = [g.pattern for g in config.groups for _ in range(g.repeats)]
    return leaves.replace(groups=tuple(tuple(declare_layer(config, k) for k in kinds) for kinds in one_by_one))


def gathered(params: Layer, config: ModelConfig, kind: LayerKind) -> Layer:
    """A layer's parameters as its computation wants them, where each device has a part."""
    gather = target().gather
    return params if gather is None else tree.map_leaves(gather, declare_layer(config, kind), params)


def init(config: ModelConfig, key: jax.Array, critic: bool = False) -> Transformer:
    """Random parameters."""
    return tree.initialise(abstract(config, critic), key, config.dtype, config.initializer_range)


def critic_from_policy(params: Transformer, config: ModelConfig) -> Transformer:
    """A critic that starts as the policy: its tree without lm_head and draft layer, and a value head at zero."""
    value = jnp.zeros((config.hidden_size + 1,), params.norm.dtype)
    return params.replace(head=None, draft=None, value=value)


def unstack(params: Transformer, config: ModelConfig) -> Transformer:
    """The layers one by one instead of stacked."""
    groups = []
    for group, layers in zip(config.groups, params.groups, strict=True):
        for r in range(group.repeats):
            pick = (lambda a: a) if group.repeats == 1 else (lambda a, r=r: a[r])
            groups.append(tuple(jax.tree.map(pick, layer) for layer in layers))
    return params.replace(groups=tuple(groups))


def for_decoding(params: Transformer, config: ModelConfig) -> Transformer:
    """The layers in the form a decode loop runs fastest: one by one on a CPU, where slicing a stack copies it."""
    return unstack(params, config) if on_cpu() else params
