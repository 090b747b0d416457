"""The command line: `glm-jax VERB ...`. Each verb is a file of its own, imported only when it is called."""

from __future__ import annotations

import importlib
import sys
import traceback
from difflib import get_close_matches

VERBS = {
    "train": "train a model by the stages of a config",
    "eval": "measure pass@1 and pass@k of a trained policy on held-out tasks",
    "generate": "sample completions of prompts from a model on disk",
    "convert": "write a model folder anew, in another dtype or other file sizes",
    "plan": "compile a config's program for a pod that is not there: memory, costs, fits or not",
    "envs": "check tasks of environments by their gates, run an agent on one",
    "bench": "measure this stack beside others on this machine",
}
USAGE, FAILED, INTERRUPTED = 2, 1, 130  # exit codes


def main(argv: list[str] | None = None) -> int:
    """Runs a verb and returns the exit code.

    A verb is a module glm_jax.cli.VERB with `run(argv) -> int`, argv being what follows the verb. Errors that this
    project defines are written for the person and shown without a traceback; any other one is a bug and keeps its own.
    """
    argv = sys.argv[1:] if argv is None else argv
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(_help())
        return 0 if argv else USAGE
    verb, *rest = argv
    if verb not in VERBS:
        near = get_close_matches(verb, VERBS, n=1)
        more = f"did you mean {near[0]!r}?" if near else f"it knows {', '.join(VERBS)}"
        print(f"glm-jax: {verb!r} is no verb; {more} (glm-jax --help)", file=sys.stderr)
        return USAGE
    try:
        return importlib.import_module(f"glm_jax.cli.{verb}").run(rest)
    except KeyboardInterrupt:
        print(f"glm-jax {verb}: interrupted", file=sys.stderr)
        return INTERRUPTED
    except Exception as error:
        if not _is_ours(error):
            raise
        return report(verb, error)


def report(verb: str, error: BaseException) -> int:
    """Tells the person of the error that ended a verb; returns the exit code."""
    if _is_ours(error):
        print(f"glm-jax {verb}: {error}", file=sys.stderr)
    else:
        traceback.print_exception(error)
    return getattr(error, "exit_code", FAILED)


def _is_ours(error: BaseException) -> bool:
    return type(error).__module__.startswith(("glm_jax.", "pallas_kernels."))


def _help() -> str:
    width = max(map(len, VERBS))
    lines = [f"  {verb:<{width}}  {summary}" for verb, summary in VERBS.items()]
    return "\n".join(
        [
            "usage: glm-jax VERB --config experiments/configs/NAME.py --workdir DIR [--config.section.key=VALUE ...]",
            "",
            "verbs:",
            *lines,
            "",
            "glm-jax VERB --help lists the flags of a verb.",
        ]
    )
