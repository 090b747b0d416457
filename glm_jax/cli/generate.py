"""`glm-jax generate MODEL --prompt "..." ...`: completions of prompts from a model folder, one per line."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from absl import flags

from glm_jax.cli.flags import UsageError, parse


def _define(values: flags.FlagValues) -> None:
    flags.DEFINE_multi_string("prompt", None, "a prompt; say it again for more", flag_values=values)
    flags.DEFINE_multi_string("stop", [], "text that ends a completion; say it again for more", flag_values=values)
    flags.DEFINE_integer("max_new_tokens", 32, "longest completion", lower_bound=1, flag_values=values)
    flags.DEFINE_float("temperature", 0.0, "0 = greedy", lower_bound=0.0, flag_values=values)
    flags.DEFINE_float("top_p", 1.0, "share of probability that is sampled from", 0.0, 1.0, flag_values=values)
    flags.DEFINE_bool("chat", False, "each prompt is a message to the model's chat template", flag_values=values)
    flags.DEFINE_bool("keep_fp8", False, "what the files hold in FP8 stays so: less memory", flag_values=values)
    flags.DEFINE_integer("drafts", 0, "tokens the draft layer proposes at a time", lower_bound=0, flag_values=values)
    flags.DEFINE_integer("seed", 0, "of the random numbers", flag_values=values)


def run(argv: Sequence[str]) -> int:
    """Prints each prompt and its completion. The folder is a model in the public layout, such as WORKDIR/policy."""
    command = parse("generate", argv, _define, positional=("model",), required=("prompt",))
    # jax is imported here and not above, so that --help answers at once.
    from glm_jax.data.tokenizer import tokenizer_of
    from glm_jax.io.hf import load, read_config
    from glm_jax.rollout import strings
    from glm_jax.rollout.generate import generate

    folder, options = Path(command.positional[0]).expanduser(), command.flags
    tokenizer = tokenizer_of(folder)
    if options.chat and not hasattr(tokenizer, "chat"):
        raise UsageError(f"{folder} has no tokenizer.json, and bytes have no chat template: leave --chat out")
    config = read_config(folder)
    if not tokenizer.fits(config.vocab_size):
        raise UsageError(
            f"{folder} has {config.vocab_size} token ids and its tokenizer {tokenizer.vocab_size}: they do not belong "
            "together"
        )
    if options.drafts and not config.num_nextn_predict_layers:
        raise UsageError(f"{folder} has no draft (MTP) layer (num_nextn_predict_layers is 0): leave --drafts out")
    if problems := strings.check(options.stop):
        raise UsageError("; ".join(problems))
    config, params = load(folder, keep_fp8=options.keep_fp8)
    texts = [tokenizer.chat([{"role": "user", "content": p}]) if options.chat else p for p in options.prompt]
    completions = generate(
        params,
        config,
        [tokenizer.encode(text) for text in texts],
        options.max_new_tokens,
        temperature=options.temperature,
        top_p=options.top_p,
        stop=tokenizer.stop_ids,
        seed=options.seed,
        drafts=options.drafts,
        stop_strings=options.stop,
        decode=tokenizer.decode,
    )
    for prompt, completion in zip(options.prompt, completions, strict=True):
        print(f"{'' if options.chat else prompt}{tokenizer.decode(completion.tokens)}")
    return 0
