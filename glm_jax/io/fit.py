"""Whether a folder's tensors are those that its config describes: what is missing, strange, misshapen, or lost."""

from __future__ import annotations

import logging
from pathlib import Path

from glm_jax.io import layout
from glm_jax.io.folder import CheckpointError
from glm_jax.io.tensors import FP8, SCALES, WEIGHTS, Tensors, scale_shape
from glm_jax.model.config import ModelConfig
from glm_jax.model.weights import Transformer

logger = logging.getLogger(__name__)

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def check(folder: Path, config: ModelConfig, entries: Transformer, tensors: Tensors) -> None:
    """Raises CheckpointError with everything that does not fit."""
    want = {name: shape for entry in layout.all_entries(entries) for name, shape in entry.tensors()}
    have, dtype = tensors.shape, tensors.dtype
    scales = {tensors.scale_name(n): scale_shape(shape) for n, shape in want.items() if dtype.get(n) == FP8}
    of_weights, want = want.keys(), want | scales
    copies = {name: of for name, of in _copies(config).items() if name in have}
    ours = {name for name in have if name not in copies and not _ignored(name, config)}
    if skipped := len(have) - len(ours):
        logger.info("%s: %d tensors are not read (rotary buffers, an undeclared draft layer, copies)", folder, skipped)
    problems = [f"missing {n} {want[n]}" for n in sorted(want.keys() - have.keys())]
    problems += [f"unexpected {n} {have[n]}" for n in sorted(ours - want.keys())]
    both = sorted(want.keys() & have.keys())
    problems += [f"misshapen {n}: {have[n]} in the file, {want[n]} by the config" for n in both if have[n] != want[n]]
    for n in both:
        what, known = ("weights", WEIGHTS) if n in of_weights else ("scales", SCALES)
        if dtype[n] not in known:
            problems.append(f"{n} is {dtype[n]}: {what} are {', '.join(known)}")
    problems += [f"{n} is {FP8}: only matrices may be" for n in both if dtype[n] == FP8 and len(have[n]) != 2]
    if not problems:  # values are compared where names, shapes and dtypes are right
        problems = [_lost(n, of) for n, of in sorted(copies.items()) if not tensors.same(n, of)]
    if problems:
        raise CheckpointError(
            f"{folder}: {len(problems)} tensors do not fit its config.json:\n  " + "\n  ".join(problems)
        )


def _copies(config: ModelConfig) -> dict[str, str]:
    """Tensors that only repeat others, and which: a tied head; a draft layer's embedding and head in older files."""
    copies = {HEAD: EMBEDDING} if config.tie_word_embeddings else {}
    if config.num_nextn_predict_layers:
        prefix = layout.draft_prefix(config)
        head = EMBEDDING if config.tie_word_embeddings else HEAD
        copies |= {prefix + "embed_tokens.weight": EMBEDDING, prefix + "shared_head.head.weight": head}
    return copies


def _lost(name: str, of: str) -> str:
    if name == HEAD:
        remedy = "tie_word_embeddings makes the embedding the head; set it to false to keep both"
    else:
        remedy = "the draft layer takes the model's; set num_nextn_predict_layers to 0 to load it without a draft layer"
    return f"{name} differs from {of} and would be lost: {remedy}"


def _ignored(name: str, config: ModelConfig) -> bool:
    """Rotary buffers, and a draft layer that is not wanted."""
    draft = not config.num_nextn_predict_layers and name.startswith(layout.draft_prefix(config))
    return draft or name.endswith("rotary_emb.inv_freq")
