"""`glm-jax bench rl`: CPU seconds of one RL iteration on one thread, ours beside TRL's GRPO, interleaved."""

from __future__ import annotations

import sys
from pathlib import Path

from glm_jax.bench.duel import Contender, duel, has_modules, medians
from glm_jax.bench.shape import FULL, SMOKE

PEER = "TRL GRPO"


def run(repeats: int, peer_python: str | None, report: Path | None, smoke: bool) -> str:
    """The table as text; with `report`, every figure as JSON. Without trl installed, ours stands alone and says so."""
    size = "smoke" if smoke else "full"
    work = SMOKE if smoke else FULL
    ours = "glm_jax.bench.ours"
    contenders = [
        Contender("glm_jax, policy only", sys.executable, ours, ["running_mean", size]),
        Contender("glm_jax, SAO (critic, K = 2)", sys.executable, ours, ["sao", size]),
    ]
    peer = peer_python or sys.executable
    has_peer = has_modules(peer, "trl", "torch", "transformers")
    if has_peer:
        # By path: the peer's environment need not have this package.
        script = str(Path(__file__).with_name("trl_grpo.py"))
        contenders.append(Contender(PEER, peer, script, [size]))
    figures = duel(contenders, repeats)
    middle = medians(figures, report, size)
    lines = [
        f"One RL iteration: {work.completions} completions ({work.prompt} prompt + {work.new} new tokens), one update; "
        f"1.28 M parameters, float32.",
        f"CPU seconds on one thread, median of {repeats} interleaved repeats.",
        "",
        "| stack | sampling | learning | iteration | sampled tokens/s | peak RSS MiB |",
        "|---|---|---|---|---|---|",
    ]
    tokens = work.completions * work.new
    for name, m in middle.items():
        lines.append(
            f"| {name} | {m['sample']:.2f} | {m['learn']:.2f} | {m['total']:.2f} | {tokens / m['sample']:,.0f} "
            f"| {m['peak_mib']:,.0f} |"
        )
    lines.append("")
    if has_peer:
        base, peer_m = middle["glm_jax, policy only"], middle[PEER]
        lines.append(
            f"{PEER} / glm_jax policy only: sampling {peer_m['sample'] / base['sample']:.1f}x, "
            f"iteration {peer_m['total'] / base['total']:.1f}x."
        )
    else:
        lines.append(f"trl is not installed for {peer}: name a python that has it with --peer_python.")
    return "\n".join(lines)
