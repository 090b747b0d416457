"""GLM-5.2's forward pass in numpy and float64, a loop per query and per token, over the tensors of a model folder.

Written from the published architecture and sharing no line with the model: it knows nothing of scans, chunks, caches,
stacked layers or our parameters' shapes.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class Reference(NamedTuple):
    logits: np.ndarray  # [B, S, V], zero at padding
    selection: list[list[list[list[int]]]]  # per computing layer, row and query: ascending columns
    routes: list[list[list[list[int]]]]  # per sparse layer, row and token: ascending experts
    kl: float  # Σ over tokens and computing layers of the mean, over the layers it serves, of KL(attention ‖ indexer)


def run(tensors: dict, config, tokens: np.ndarray, documents: np.ndarray) -> Reference:
    weights = {name: np.asarray(t, np.float64) for name, t in tensors.items()}
    rows = [_row(weights, config, tokens[b], documents[b]) for b in range(tokens.shape[0])]
    by_layer = lambda part: [list(layer) for layer in zip(*(row[part] for row in rows), strict=True)]
    return Reference(np.stack([row[0] for row in rows]), by_layer(1), by_layer(2), sum(row[3] for row in rows))


def _row(w, config, tokens, documents):
    length = len(tokens)
    sees = [[t for t in range(s + 1) if documents[t] == documents[s] and documents[s] > 0] for s in range(length)]
    position = [max(len(keys) - 1, 0) for keys in sees]
    x = np.where(documents[:, None] > 0, w["model.embed_tokens.weight"][tokens], 0.0)
    selections, routes, divergences, chosen = [], [], [], None
    for i in range(config.num_hidden_layers):
        p = {n.removeprefix(f"model.layers.{i}."): t for n, t in w.items() if n.startswith(f"model.layers.{i}.")}
        a = _rms(x, p["input_layernorm.weight"], config.rms_norm_eps)
        c_q = _rms(_linear(p, "self_attn.q_a_proj", a), p["self_attn.q_a_layernorm.weight"], config.latent_norm_eps)
        if config.indexer_types[i] == "full":
            score = _index_scores(p, config, a, c_q, position)
            chosen = [_best(score[s], keys, config.index_topk) for s, keys in enumerate(sees)]
            selections.append(chosen)
            divergences.append([])
        out, probs = _attention(p, config, a, c_q, position, chosen)
        divergences[-1].append(sum(_kl(probs[s], score[s, keys]) for s, keys in enumerate(chosen) if keys))
        x = x + out
        h = _rms(x, p["post_attention_layernorm.weight"], config.rms_norm_eps)
        if config.mlp_layer_types[i] == "dense":
            x = x + _mlp(p, "mlp.", h)
        else:
            out, experts = _moe(p, config, h)
            routes.append(experts)
            x = x + out
    final = _rms(x, w["model.norm.weight"], config.rms_norm_eps)
    head = w["model.embed_tokens.weight"] if config.tie_word_embeddings else w["lm_head.weight"]
    kl = sum(np.mean(served) for served in divergences)
    return np.where(documents[:, None] > 0, final @ head.T, 0.0), selections, routes, kl


def _best(score, keys, k):
    """The k best of these keys, ties to the lower column; ascending."""
    return sorted(sorted(keys, key=lambda t: (-score[t], t))[:k])


def _rms(x, weight, eps):
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * weight


def _linear(p, name, x):
    return x @ p[name + ".weight"].T + p.get(name + ".bias", 0.0)


def _rotate(x, position, config):
    """Pairs (x_2j, x_2j+1) as complex numbers, turned by position · θ^(-2j/width), or as YaRN has it."""
    width, scale = x.shape[-1], 1.0
    frequency = config.rope_theta ** (-np.arange(0, width, 2) / width)
    if (yarn := config.yarn) is not None:
        scale = _magnitude(yarn, yarn.mscale) / _magnitude(yarn, yarn.mscale_all_dim)
        length = yarn.original_max_position_embeddings
        # The channel, a real number, that turns so often in the trained context.
        channel = lambda turns: width / 2 * np.log(length / (2 * np.pi * turns)) / np.log(config.rope_theta)
        first, last = np.floor(max(channel(yarn.beta_fast), 0)), np.ceil(channel(yarn.beta_slow))
        for j in range(width // 2):
            slow = min(max((j - first) / (last - first), 0.0), 1.0)
            frequency[j] = slow * frequency[j] / yarn.factor + (1 - slow) * frequency[j]
    turn = scale * np.exp(1j * np.asarray(position)[:, None] * frequency)
    turned = (x[..., 0::2] + 1j * x[..., 1::2]) * turn.reshape(len(position), *[1] * (x.ndim - 2), -1)
    return np.stack([turned.real, turned.imag], axis=-1).reshape(x.shape)


def _magnitude(yarn, mscale):
    return 0.1 * mscale * np.log(yarn.factor) + 1.0


def _index_scores(p, config, a, c_q, position):
    heads, width, roped = config.index_n_heads, config.index_head_dim, config.qk_rope_head_dim
    q = _linear(p, "self_attn.indexer.wq_b", c_q).reshape(len(a), heads, width)
    k = _linear(p, "self_attn.indexer.wk", a)
    k = (k - k.mean(-1, keepdims=True)) / np.sqrt(k.var(-1, keepdims=True) + 1e-6)
    k = k * p["self_attn.indexer.k_norm.weight"] + p["self_attn.indexer.k_norm.bias"]
    q = np.concatenate([_rotate(q[..., :roped], position, config), q[..., roped:]], axis=-1)
    k = np.concatenate([_rotate(k[..., :roped], position, config), k[..., roped:]], axis=-1)
    weight = _linear(p, "self_attn.indexer.weights_proj", a) * heads**-0.5
    dots = np.maximum(np.einsum("sjx,tx->sjt", q, k) * width**-0.5, 0.0)
    return np.einsum("sj,sjt->st", weight, dots)


def _attention(p, config, a, c_q, position, chosen):
    heads, nope, rank = config.num_attention_heads, config.qk_nope_head_dim, config.kv_lora_rank
    q = _linear(p, "self_attn.q_b_proj", c_q).reshape(len(a), heads, -1)
    q_rope = _rotate(q[..., nope:], position, config)
    kv = _linear(p, "self_attn.kv_a_proj_with_mqa", a)
    latent = _rms(kv[:, :rank], p["self_attn.kv_a_layernorm.weight"], config.latent_norm_eps)
    k_rope = _rotate(kv[:, rank:], position, config)
    kv = (latent @ p["self_attn.kv_b_proj.weight"].T).reshape(len(a), heads, -1)
    k, v = kv[..., :nope], kv[..., nope:]
    out = np.zeros((len(a), heads, v.shape[-1]))
    probs = [np.zeros(len(keys)) for keys in chosen]  # mean over heads
    scale = q.shape[-1] ** -0.5 * (_magnitude(config.yarn, config.yarn.mscale_all_dim) ** 2 if config.yarn else 1.0)
    for s, keys in enumerate(chosen):
        for h in range(heads if keys else 0):
            score = (k[keys, h] @ q[s, h, :nope] + k_rope[keys] @ q_rope[s, h]) * scale
            prob = np.exp(score - score.max()) / np.exp(score - score.max()).sum()
            out[s, h] = prob @ v[keys, h]
            probs[s] += prob / heads
    return _linear(p, "self_attn.o_proj", out.reshape(len(a), -1)), probs


def _kl(prob, score):
    log_q = score - score.max() - np.log(np.exp(score - score.max()).sum())
    return np.sum(prob * (np.log(prob) - log_q))


def _mlp(p, prefix, x):
    gate, up = _linear(p, prefix + "gate_proj", x), _linear(p, prefix + "up_proj", x)
    return _linear(p, prefix + "down_proj", gate / (1 + np.exp(-gate)) * up)


def _moe(p, config, x):
    score = 1 / (1 + np.exp(-_linear(p, "mlp.gate", x)))
    biased = score + p["mlp.gate.e_score_correction_bias"]
    size = config.n_routed_experts // config.n_group
    out, routes = _mlp(p, "mlp.shared_experts.", x), []
    for n in range(len(x)):
        groups = [range(g * size, (g + 1) * size) for g in range(config.n_group)]
        groups.sort(key=lambda g: -sum(sorted(biased[n, list(g)])[-2:]))
        allowed = [e for g in groups[: config.topk_group] for e in g]
        best = sorted(sorted(allowed, key=lambda e: (-biased[n, e], e))[: config.num_experts_per_tok])
        total = sum(score[n, e] for e in best) if config.norm_topk_prob else 1.0
        for e in best:
            out[n] += config.routed_scaling_factor * score[n, e] / total * _mlp(p, f"mlp.experts.{e}.", x[n])
        routes.append(best)
    return out, routes
