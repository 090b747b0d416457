"""The part of a Dockerfile that a box can follow: a known base, files, folders and variables."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path, PurePosixPath

from glm_jax.envs.sandbox.files import File, read_tree
from glm_jax.envs.tasks.task import NeedsContainer, Step, TaskError, read_text

# Bases whose programs the host's own read-only system stands in for.
_BASES = re.compile(r"(docker\.io/)?(library/)?(python:3(\.\d+)*(-slim(-\w+)?)?|(ubuntu|debian)(:[\w.-]+)?)$")
_COMMANDS = {"mkdir", "chmod", "echo", "cp", "touch", "true"}  # all that a RUN may start, pip install apart
_IGNORED = {"USER", "CMD", "ENTRYPOINT", "LABEL", "MAINTAINER", "SHELL", "EXPOSE"}  # a box has its own of these


@dataclass
class Recipe:
    """What a Dockerfile comes to."""

    workdir: str = "/app"
    env: dict[str, str] = field(default_factory=dict)
    start: dict[str, File] = field(default_factory=dict)
    steps: list[Step] = field(default_factory=list)


def follow(path: Path) -> Recipe:
    """Reads a Dockerfile. Raises NeedsContainer, with the line, for what a box cannot do."""
    recipe, based = Recipe(workdir="/"), False
    context = read_tree(path.parent)
    for line, name, rest in _instructions(path):
        if not rest:
            raise TaskError(f"{path}:{line}: {name} stands alone; something has to follow it")
        if name == "FROM":
            if based:
                raise NeedsContainer(path, line, "several stages")
            words = [word for word in rest.split() if not word.startswith("--")]
            if not words or not _BASES.match(words[0]) or len(words) > 1:
                raise NeedsContainer(path, line, f"FROM {rest}; a box stands in for python:3.x-slim, ubuntu and debian")
            based = True
        elif not based:
            raise TaskError(f"{path}:{line}: {name} stands before FROM; a Dockerfile begins with FROM")
        elif name == "WORKDIR":
            recipe.workdir = _absolute(_expand(rest, recipe.env), recipe.workdir)
        elif name == "ENV":
            recipe.env |= _assignments(path, line, rest, recipe.env)
        elif name == "COPY":
            _copy(path, line, rest, recipe, context)
        elif name == "RUN":
            if step := _run(path, line, rest, recipe):
                recipe.steps.append(step)
        elif name not in _IGNORED:
            raise NeedsContainer(path, line, f"{name} is nothing that a box can do")
    if not based:
        raise TaskError(f"{path}: there is no FROM in it; a Dockerfile begins with FROM")
    return recipe


def _instructions(path: Path) -> list[tuple[int, str, str]]:
    """(line, name, rest) of each instruction, continued lines joined."""
    found, begin, text = [], 0, ""
    for number, line in enumerate(read_text(path).splitlines(), 1):
        if line.lstrip().startswith("#") or (not line.strip() and not text):
            continue
        begin = begin or number
        if line.rstrip().endswith("\\"):
            text += line.rstrip()[:-1] + " "
            continue
        if "<<" in line:
            raise NeedsContainer(path, number, "a here-document")
        name, _, rest = (text + line).strip().partition(" ")
        found.append((begin, name.upper(), rest.strip()))
        begin, text = 0, ""
    return found


def _copy(path: Path, line: int, rest: str, recipe: Recipe, context: Mapping[str, File]) -> None:
    try:
        words = shlex.split(rest)
    except ValueError as error:
        raise TaskError(f"{path}:{line}: COPY {rest}: {error}") from error
    if any(word.startswith("--") and not word.startswith(("--chown", "--chmod")) for word in words):
        raise NeedsContainer(path, line, f"COPY {rest}: options other than --chown and --chmod")
    words = [_expand(word, recipe.env) for word in words if not word.startswith("--")]
    if len(words) < 2:
        raise TaskError(f"{path}:{line}: COPY {rest}: it wants a source and a destination")
    *sources, destination = words
    target = _absolute(destination, recipe.workdir)
    for source in sources:
        source = str(PurePosixPath(source.lstrip("/")))
        if any(c in source for c in "*?["):
            raise NeedsContainer(path, line, f"COPY {rest}: patterns")
        if file := context.get(source):
            into = destination.endswith("/") or len(sources) > 1 or destination in (".", "./")
            recipe.start[f"{target}/{PurePosixPath(source).name}" if into else target] = file
            continue
        below = {name: file for name, file in context.items() if source == "." or name.startswith(source + "/")}
        below = {name: file for name, file in below.items() if name not in ("Dockerfile", ".dockerignore")}
        if not below:
            raise TaskError(f"{path}:{line}: COPY {rest}: {source} is not in {path.parent}")
        cut = 0 if source == "." else len(source) + 1
        recipe.start |= {f"{target.rstrip('/')}/{name[cut:]}": file for name, file in below.items()}


def _run(path: Path, line: int, rest: str, recipe: Recipe) -> Step | None:
    """The step, or None where the host has what pip would install."""
    if rest.startswith(("[", "--")):
        raise NeedsContainer(path, line, f"RUN {rest}: the exec form and options")
    kept = []
    for command in re.split(r"&&|;", rest):
        try:
            words = shlex.split(command)
        except ValueError as error:
            raise TaskError(f"{path}:{line}: RUN {rest}: {error}") from error
        while words and re.match(r"\w+=", words[0]):
            words = words[1:]
        if not words:
            continue
        if words[:2] in (["pip", "install"], ["pip3", "install"]) or words[:4] == ["python", "-m", "pip", "install"]:
            _installed(path, line, words[words.index("install") + 1 :])
        elif words[0] in _COMMANDS and not re.search(r"[|`]|\$\(", command):
            kept.append(command.strip())
        else:
            raise NeedsContainer(path, line, f"RUN {command.strip()}: a box runs {', '.join(sorted(_COMMANDS))}")
    return Step(" && ".join(kept), recipe.workdir, dict(recipe.env)) if kept else None


def _installed(path: Path, line: int, words: list[str]) -> None:
    """Checks that this Python has each package, in the version where one is pinned."""
    for word in words:
        if word.startswith("-"):
            if word in ("--no-cache-dir", "-q", "--quiet", "--upgrade", "-U", "--no-cache"):
                continue
            raise NeedsContainer(path, line, f"pip install {word}")
        name, _, version = re.split(r"\[.*\]", word)[0].partition("==")
        try:
            here = metadata.version(name)
        except metadata.PackageNotFoundError as error:
            raise NeedsContainer(path, line, f"pip install {word}, which this Python has not") from error
        except ValueError as error:
            raise NeedsContainer(path, line, f"pip install {word}") from error
        if version and version != here:
            raise NeedsContainer(path, line, f"pip install {word}; this Python has {here}")


def _assignments(path: Path, line: int, rest: str, env: Mapping[str, str]) -> dict[str, str]:
    if "=" not in rest.split()[0]:
        name, _, value = rest.partition(" ")
        return {name: _expand(value.strip(), env)}
    try:
        pairs = [word.partition("=") for word in shlex.split(rest)]
    except ValueError as error:
        raise TaskError(f"{path}:{line}: ENV {rest}: {error}") from error
    return {name: _expand(value, env) for name, _, value in pairs}


def _expand(text: str, env: Mapping[str, str]) -> str:
    return re.sub(r"\$\{?(\w+)\}?", lambda match: env.get(match[1], ""), text)


def _absolute(path: str, workdir: str) -> str:
    parts: list[str] = []
    for part in PurePosixPath(workdir, path).parts[1:]:
        if part == "..":
            parts = parts[:-1]
        elif part != ".":
            parts.append(part)
    return "/" + "/".join(parts)
