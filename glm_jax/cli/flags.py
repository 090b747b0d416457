"""The flags of a verb: its config file with overrides of any key, its workdir, and what the verb defines itself."""

from __future__ import annotations

import difflib
import re
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from absl import flags
from ml_collections import ConfigDict, config_flags

_OVERRIDE = re.compile(r"--?(?:no)?config\.([^=]+)")


class UsageError(ValueError):
    """A command line that cannot be understood, or a config file that cannot be loaded."""

    exit_code = 2


@dataclass(frozen=True)
class Command:
    """A parsed command line. `flags.NAME` is the value of a flag that the verb defined."""

    config: ConfigDict | None
    workdir: Path | None
    positional: tuple[str, ...]
    flags: flags.FlagValues


def parse(
    verb: str,
    argv: Sequence[str],
    define: Callable[[flags.FlagValues], Any] = lambda values: None,
    positional: Sequence[str] = (),
    required: Sequence[str] = ("config", "workdir"),
) -> Command:
    """Parses what follows the verb.

    `define(values)` adds the verb's own flags, as in `flags.DEFINE_bool("dry_run", False, "...", flag_values=values)`;
    `positional` names the arguments without a dash, all of which have to be given (the last one more than once, if its
    name ends in "..."); `required` names flags.
    Raises UsageError for anything unknown or missing and for a config file that fails; `--help` prints the flags and
    raises SystemExit(0).
    """
    values = flags.FlagValues()
    flags.DEFINE_string("config", None, "config file; --config.a.b=VALUE sets a key of it", flag_values=values)
    flags.DEFINE_string("workdir", None, "folder of the run", flag_values=values)
    define(values)
    if {"-h", "--help"} & set(argv):
        print(_help(verb, values, positional))
        raise SystemExit(0)
    overrides = [arg for arg in argv if _OVERRIDE.match(arg)]
    try:
        rest = values([f"glm-jax {verb}", *(arg for arg in argv if arg not in overrides)])[1:]
    except flags.Error as error:
        raise UsageError(f"{error} (glm-jax {verb} --help)") from error
    more = bool(positional) and positional[-1].endswith("...")
    if len(rest) != len(positional) and not (more and len(rest) > len(positional)):
        wanted = " ".join(name.upper() for name in positional) or "no argument without --"
        raise UsageError(f"got {' '.join(rest) or 'nothing'} where {wanted} is wanted (glm-jax {verb} --help)")
    missing = [f"--{name}" for name in required if getattr(values, name) is None]
    if missing:
        raise UsageError(f"{' and '.join(missing)} missing (glm-jax {verb} --help)")
    if overrides and values.config is None:
        raise UsageError(f"{overrides[0]} sets a key of a config, and --config is missing (glm-jax {verb} --help)")
    config = None if values.config is None else _override(_load(values.config), overrides)
    workdir = Path(values.workdir).expanduser() if values.workdir else None
    return Command(config, workdir, tuple(rest), values)


def _load(path: str) -> ConfigDict:
    """What get_config() of a file returns."""
    if not Path(path.partition(":")[0]).is_file():
        raise UsageError(f"--config={path}: there is no such file")
    values = flags.FlagValues()
    argv = ["", f"--config={path}"]
    config_flags.DEFINE_config_file("config", None, flag_values=values, sys_argv=argv, lock_config=False)
    try:
        values(argv)
        config = values.config
    except Exception as error:  # a config file is code, which may raise anything
        frames = traceback.extract_tb(error.__traceback__)
        place = ([f for f in frames if f.filename.endswith(Path(path.partition(":")[0]).name)] or frames)[-1]
        where = f"{place.filename}:{place.lineno}"
        raise UsageError(f"--config={path} fails at {where}: {type(error).__name__}: {error}") from error
    if not isinstance(config, ConfigDict):
        raise UsageError(f"--config={path}: get_config() returned a {type(config).__name__}; it has to be a ConfigDict")
    return config


def _override(config: ConfigDict, overrides: Sequence[str]) -> ConfigDict:
    """The config with its overrides applied, each parsed as the type of the value that it replaces."""
    problems = [problem for arg in overrides if (problem := _unknown(config, arg))]
    if problems:
        raise UsageError("\n".join(problems))
    values = flags.FlagValues()
    argv = ["", *overrides]
    try:
        config_flags.DEFINE_config_dict("config", config, flag_values=values, sys_argv=argv)
        values(argv)
    except (flags.Error, AttributeError, KeyError, TypeError, ValueError) as error:
        raise UsageError(str(error)) from error
    return values.config


def _unknown(config: ConfigDict, arg: str) -> str | None:
    """What is wrong with the key of an override, if anything is."""
    here, path = config, "config"
    for part in _OVERRIDE.match(arg)[1].split("."):
        name = part.partition("[")[0]
        if not isinstance(here, ConfigDict):
            return f"{arg}: {path} is {here!r}, which has no keys of its own"
        if name not in here:
            near = difflib.get_close_matches(name, here, n=1, cutoff=0.5)
            more = f"did you mean {path}.{near[0]}?" if near else f"known here: {', '.join(here)}"
            return f"{arg}: {path}.{name} is no known key; {more}"
        here, path = here[name], f"{path}.{name}"
        if name != part:
            return None  # an entry of a tuple
    return None


def _help(verb: str, values: flags.FlagValues, positional: Sequence[str]) -> str:
    lines = [f"usage: glm-jax {' '.join([verb, *(name.upper() for name in positional)])} [flags]", "", "flags:"]
    for name in values:
        flag = values[name]
        default = "" if flag.default is None else f" (default {flag.default!r})"
        lines.append(f"  --{name:<12}  {flag.help}{default}")
    return "\n".join(lines)
