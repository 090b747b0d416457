"""transformers' side of `bench model`: `generate` at its default setting (sdpa, grouped_mm), or eager.

Imports nothing of ours but the shape, so it runs in an environment that has torch and transformers alone.
"""

from __future__ import annotations

import sys

import torch


def main(folder: str, size: str, implementation: str) -> None:
    # Files beside this script, which Python finds by themselves: importing the package would want jax.
    import duel
    import shape
    from transformers import GlmMoeDsaForCausalLM

    torch.set_num_threads(1)
    kwargs = {} if implementation == "default" else {"attn_implementation": implementation}
    model = GlmMoeDsaForCausalLM.from_pretrained(folder, dtype=torch.float32, **kwargs).eval()
    draw = torch.Generator().manual_seed(0)

    def generate(prompts: int, length: int, new: int) -> None:
        tokens = torch.randint(3, model.config.vocab_size, (prompts, length), generator=draw)
        options = dict(max_new_tokens=new, min_new_tokens=new, do_sample=False, pad_token_id=0)
        with torch.inference_mode():
            made = model.generate(tokens, attention_mask=torch.ones_like(tokens), **options)
        assert made.shape == (prompts, length + new)

    text = shape.TEXTS[size]

    def iteration() -> dict[str, float]:
        return shape.timed(text.alone, text.new, generate, duel.cpu_seconds) | {"peak_mib": duel.peak_mib()}

    duel.serve(iteration)


if __name__ == "__main__":
    main(*sys.argv[1:])
