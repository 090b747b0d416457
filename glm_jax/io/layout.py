"""The public checkpoint layout: how each parameter of ours stands in a file, one declaration for reading and writing.

Files hold matrices as [out, in], heads and experts one after another; ours are [in, out] with heads and experts as
dimensions, and gate and up side by side.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import numpy as np

from glm_jax.model.attention import Attention
from glm_jax.model.config import ModelConfig
from glm_jax.model.indexer import Indexer
from glm_jax.model.moe import Mlp, Moe
from glm_jax.model.schedule import LayerKind
from glm_jax.model.weights import DRAFT_KIND, Draft, Layer, Transformer


class Entry(NamedTuple):
    """One parameter and the file tensors that hold it: one group of them, or with `many` a group per expert."""

    groups: tuple[tuple[str, ...], ...]  # names of file tensors
    shapes: tuple[tuple[int, ...], ...]  # of one group's tensors
    join: Callable[[Sequence[np.ndarray]], np.ndarray]  # a group's tensors -> the parameter, or its part of it
    split: Callable[[np.ndarray], Sequence[np.ndarray]]  # the reverse
    many: bool = False  # the parameter's first dimension counts groups
    blocked: int | None = None  # axis, from the end, of FP8's blocks (see model/quantised.py); None: never kept in FP8

    def tensors(self) -> list[tuple[str, tuple[int, ...]]]:
        """Names and shapes of all file tensors."""
        return [pair for group in self.groups for pair in zip(group, self.shapes, strict=True)]

    def take_apart(self, parameter: np.ndarray) -> list[tuple[str, np.ndarray]]:
        """Names and values of all file tensors."""
        parts = parameter if self.many else [parameter]
        pairs = zip(self.groups, parts, strict=True)
        return [pair for group, part in pairs for pair in zip(group, self.split(part), strict=True)]


def entries(config: ModelConfig) -> Transformer:
    """A policy's parameter tree with an Entry for each leaf; `groups[0][i]` is layer i, unstacked."""
    dim, vocab = config.hidden_size, config.vocab_size
    tied = config.tie_word_embeddings
    return Transformer(
        embed=_plain("model.embed_tokens.weight", (vocab, dim)),
        groups=(tuple(_layer(config, kind, f"model.layers.{i}.") for i, kind in enumerate(config.kinds)),),
        norm=_plain("model.norm.weight", (dim,)),
        head=None if tied else _matrix("lm_head.weight", (vocab, dim)),
        value=None,
        draft=_draft(config, draft_prefix(config)) if config.num_nextn_predict_layers else None,
    )


def all_entries(entries: Transformer | Layer) -> list[Entry]:
    return jax.tree.leaves(entries, is_leaf=lambda x: isinstance(x, Entry))


def draft_prefix(config: ModelConfig) -> str:
    """Files store the draft layer as the one after the last."""
    return f"model.layers.{config.num_hidden_layers}."


def _draft(config: ModelConfig, prefix: str) -> Draft:
    dim = config.hidden_size
    return Draft(
        embed_norm=_plain(prefix + "enorm.weight", (dim,)),
        hidden_norm=_plain(prefix + "hnorm.weight", (dim,)),
        proj=_matrix(prefix + "eh_proj.weight", (dim, 2 * dim)),
        layer=_layer(config, DRAFT_KIND, prefix),
        norm=_plain(prefix + "shared_head.norm.weight", (dim,)),
    )


def _plain(name, shape) -> Entry:
    return Entry(((name,),), (shape,), lambda t: t[0], lambda a: [a])


def _matrix(name, shape) -> Entry:
    return Entry(((name,),), (shape,), lambda t: t[0].T, lambda a: [a.T], blocked=-2)


def _heads(name, heads, width, inputs) -> Entry:
    """[heads · width, in] <-> [in, heads, width]."""
    return Entry(
        ((name,),),
        ((heads * width, inputs),),
        lambda t: t[0].reshape(heads, width, inputs).transpose(2, 0, 1),
        lambda a: [a.transpose(1, 2, 0).reshape(heads * width, inputs)],
        blocked=-3,
    )


def _layer(config: ModelConfig, kind: LayerKind, prefix: str) -> Layer:
    dim = config.hidden_size
    return Layer(
        attn_norm=_plain(prefix + "input_layernorm.weight", (dim,)),
        attn=_attention(config, kind.full, prefix + "self_attn."),
        mlp_norm=_plain(prefix + "post_attention_layernorm.weight", (dim,)),
        mlp=_moe(config, prefix + "mlp.") if kind.sparse else _mlp(prefix + "mlp.", dim, config.intermediate_size),
    )


def _attention(config: ModelConfig, full: bool, prefix: str) -> Attention:
    dim, heads, q_rank, rank = config.hidden_size, config.num_attention_heads, config.q_lora_rank, config.kv_lora_rank
    nope, roped, value = config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim
    kv_b, kv_b_shape = prefix + "kv_b_proj.weight", (heads * (nope + value), rank)
    # One file tensor, two parameters: rows of each head are k_nope, then v. `split` gives a part of it (merge_kv).
    of_kv_b = lambda rows: Entry(
        ((kv_b,),), (kv_b_shape,), lambda t: _kv(t[0], heads)[:, rows].swapaxes(1, 2), lambda a: [a], blocked=-2
    )
    bias = lambda name, width: _plain(prefix + name, (width,)) if config.attention_bias else None
    return Attention(
        q_a=_matrix(prefix + "q_a_proj.weight", (q_rank, dim)),
        q_norm=_plain(prefix + "q_a_layernorm.weight", (q_rank,)),
        q_b=_heads(prefix + "q_b_proj.weight", heads, nope + roped, q_rank),
        kv_a=_matrix(prefix + "kv_a_proj_with_mqa.weight", (rank + roped, dim)),
        kv_norm=_plain(prefix + "kv_a_layernorm.weight", (rank,)),
        k_b=of_kv_b(slice(None, nope)),
        v_b=of_kv_b(slice(nope, None)),
        o=Entry(
            ((prefix + "o_proj.weight",),),
            ((dim, heads * value),),
            lambda t: t[0].reshape(dim, heads, value).transpose(1, 2, 0),
            lambda a: [a.transpose(2, 0, 1).reshape(dim, heads * value)],
            blocked=-1,
        ),
        q_a_bias=bias("q_a_proj.bias", q_rank),
        kv_a_bias=bias("kv_a_proj_with_mqa.bias", rank + roped),
        o_bias=bias("o_proj.bias", dim),
        indexer=_indexer(config, prefix + "indexer.") if full else None,
    )


def _kv(tensor: np.ndarray, heads: int) -> np.ndarray:
    return tensor.reshape(heads, -1, tensor.shape[-1])


def merge_kv(k_b: np.ndarray, v_b: np.ndarray) -> np.ndarray:
    """The file's kv_b_proj from our two parameters [H, R, N] and [H, R, U]."""
    both = np.concatenate([k_b, v_b], axis=2).swapaxes(1, 2)
    return both.reshape(-1, k_b.shape[1])


def _indexer(config: ModelConfig, prefix: str) -> Indexer:
    dim, heads, width = config.hidden_size, config.index_n_heads, config.index_head_dim
    return Indexer(
        q=_heads(prefix + "wq_b.weight", heads, width, config.q_lora_rank),
        k=_matrix(prefix + "wk.weight", (width, dim)),
        k_norm=_plain(prefix + "k_norm.weight", (width,)),
        k_norm_bias=_plain(prefix + "k_norm.bias", (width,)),
        weights=_matrix(prefix + "weights_proj.weight", (heads, dim)),
    )


def _mlp(prefix: str, dim: int, width: int) -> Mlp:
    return Mlp(gate_up=_gate_up((prefix,), dim, width), down=_matrix(prefix + "down_proj.weight", (dim, width)))


def _gate_up(prefixes: tuple[str, ...], dim: int, width: int, many: bool = False) -> Entry:
    return Entry(
        tuple((p + "gate_proj.weight", p + "up_proj.weight") for p in prefixes),
        ((width, dim), (width, dim)),
        lambda t: np.stack([t[0].T, t[1].T], axis=1),
        lambda a: [a[:, 0].T, a[:, 1].T],
        many,
        blocked=-3,
    )


def _moe(config: ModelConfig, prefix: str) -> Moe:
    dim, width, count = config.hidden_size, config.moe_intermediate_size, config.n_routed_experts
    of_expert = tuple(f"{prefix}experts.{e}." for e in range(count))
    return Moe(
        router=_matrix(prefix + "gate.weight", (count, dim)),
        bias=_plain(prefix + "gate.e_score_correction_bias", (count,)),
        experts=Mlp(
            gate_up=_gate_up(of_expert, dim, width, many=True),
            down=Entry(
                tuple((p + "down_proj.weight",) for p in of_expert),
                ((dim, width),),
                lambda t: t[0].T,
                lambda a: [a.T],
                many=True,
                blocked=-2,
            ),
        ),
        shared=_mlp(prefix + "shared_experts.", dim, width * config.n_shared_experts),
    )
