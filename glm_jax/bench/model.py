"""`glm-jax bench model`: prefill and decode on one CPU thread, ours beside transformers on the same weights."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import jax

from glm_jax.bench.duel import Contender, duel, has_modules, medians
from glm_jax.bench.shape import LARGER, LONG, SHORT, Text
from glm_jax.io.hf import save
from glm_jax.model import weights
from glm_jax.model.hf_config import from_hf

OURS, PEER = "glm_jax", "transformers"


def run(repeats: int, peer_python: str | None, report: Path | None, smoke: bool) -> str:
    """The table as text; with `report`, every figure as JSON. Without transformers, ours stands alone and says so."""
    size = "smoke" if smoke else "full"
    peer = peer_python or sys.executable
    with tempfile.TemporaryDirectory() as folder:
        config = from_hf(LARGER)
        save(folder, config, weights.init(config, jax.random.key(0)))
        contenders = [Contender(OURS, sys.executable, "glm_jax.bench.model_ours", [folder, size])]
        if has_peer := has_modules(peer, "torch", "transformers"):
            # By path: the peer's environment need not have this package.
            script = str(Path(__file__).with_name("model_transformers.py"))
            for name, implementation in ((PEER, "default"), (f"{PEER}, eager", "eager")):
                contenders.append(Contender(name, peer, script, [folder, size, implementation]))
        figures = duel(contenders, repeats)
    middle = medians(figures, report, size)
    return "\n".join(
        [
            "17.0 M parameters, float32, 256 keys selected. CPU seconds on one thread through generate, median of "
            f"{repeats} interleaved repeats.",
            "",
            *_table(middle),
            "",
            _together(middle[OURS], LONG if size == "full" else SHORT),
            *([] if has_peer else ["", f"transformers is not installed for {peer}: name a python with --peer_python."]),
        ]
    )


def _table(middle: dict[str, dict[str, float]]) -> list[str]:
    """A row per figure, a column per stack, and the best peer's time over ours."""
    peers = [name for name in middle if name != OURS]
    head = ["", *middle, *([f"best {PEER} / {OURS}"] if peers else [])]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for key, ours in middle[OURS].items():
        cells = [_name(key), *(_figure(key, m[key]) if key in m else "" for m in middle.values())]
        if peers:
            best = min((middle[peer][key] for peer in peers if key in middle[peer]), default=None)
            cells.append("" if best is None else f"{best / ours:.1f}x")
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def _together(ours: dict[str, float], text: Text) -> str:
    """What prompts gain that decode together: the tokens per second of all over those of one."""
    batch, length = text.batch, text.prompts[0]
    gain = batch * ours[f"decode 1 x {length}"] / ours[f"decode {batch} x {length}"]
    return f"{batch} prompts of {length} tokens decode {gain:.1f} times the tokens per second of one."


def _name(key: str) -> str:
    return "peak memory" if key == "peak_mib" else key.replace(" ", ", ", 1) + " tokens"


def _figure(key: str, value: float) -> str:
    """Decoding in tokens per second, of all prompts together."""
    if key == "peak_mib":
        return f"{value:,.0f} MiB"
    return f"{int(key.split()[1]) / value:,.0f} tok/s" if key.startswith("decode") else f"{value:.2f} s"
