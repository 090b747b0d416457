"""`glm-jax convert MODEL OUT`: a model folder in another dtype or other file sizes, FP8 releases made plain."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from absl import flags

from glm_jax.cli.flags import UsageError, parse


def _define(values: flags.FlagValues) -> None:
    about = "of the weights written; router and its bias stay float32 (default: what config.json says)"
    flags.DEFINE_enum("dtype", None, ["float32", "bfloat16", "float16"], about, flag_values=values)
    flags.DEFINE_float(
        "file_gib", 5.0, "largest file, unless one tensor is larger", lower_bound=1e-6, flag_values=values
    )


def run(argv: Sequence[str]) -> int:
    """Writes the tokenizer's files and then the model, which appears whole or not at all. Says what was written."""
    command = parse("convert", argv, _define, positional=("model", "out"), required=())
    # jax is imported here and not above, so that --help answers at once.
    import jax

    from glm_jax.data.file_tokenizer import carry_over
    from glm_jax.io.hf import load, read_config, save
    from glm_jax.model import tree, weights

    source, out = (Path(text).expanduser() for text in command.positional)
    if out.exists() and source.resolve() == out.resolve():
        raise UsageError(f"{out} is the model itself: name another folder")
    on_host = jax.sharding.SingleDeviceSharding(jax.devices("cpu")[0])
    config = read_config(source)
    shardings = tree.map_leaves(lambda _: on_host, weights.abstract(config))
    config, params = load(source, command.flags.dtype, shardings)
    carry_over(source, out)
    save(out, config, params, shard_bytes=int(command.flags.file_gib * 2**30))
    written = sorted(out.glob("*.safetensors"))
    size = sum(file.stat().st_size for file in written)
    count = tree.size(weights.abstract(config))
    print(f"{out}: {count:,} parameters in {config.dtype}, {len(written)} file(s), {size / 2**30:.2f} GiB")
    return 0
