"""`glm-jax generate MODEL --prompt "..." ...`: completions of prompts from a model folder, one per line."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from absl import flags

from glm_jax.cli.flags import parse


def _define(values: flags.FlagValues) -> None:
    flags.DEFINE_multi_string("prompt", None, "a prompt; say it again for more", flag_values=values)
    flags.DEFINE_integer("max_new_tokens", 32, "longest completion", lower_bound=1, flag_values=values)
    flags.DEFINE_float("temperature", 0.0, "0 = greedy", lower_bound=0.0, flag_values=values)
    flags.DEFINE_float("top_p", 1.0, "share of probability that is sampled from", 0.0, 1.0, flag_values=values)
    flags.DEFINE_integer("seed", 0, "of the random numbers", flag_values=values)


def run(argv: Sequence[str]) -> int:
    """Prints each prompt and its completion. The folder is a model in the public layout, such as WORKDIR/policy."""
    command = parse("generate", argv, _define, positional=("model",), required=("prompt",))
    # jax is imported here and not above, so that --help answers at once.
    from glm_jax.data.tokenizer import ByteTokenizer
    from glm_jax.io.hf import load
    from glm_jax.rollout.generate import generate

    tokenizer = ByteTokenizer()
    config, params = load(Path(command.positional[0]).expanduser())
    options = command.flags
    completions = generate(
        params,
        config,
        [tokenizer.encode(prompt) for prompt in options.prompt],
        options.max_new_tokens,
        temperature=options.temperature,
        top_p=options.top_p,
        stop=(tokenizer.eos_id,),
        seed=options.seed,
    )
    for prompt, completion in zip(options.prompt, completions, strict=True):
        print(f"{prompt}{tokenizer.decode(completion.tokens)}")
    return 0
