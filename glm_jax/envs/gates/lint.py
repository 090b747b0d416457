"""The first gate: what can be said of a task without running it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from glm_jax.envs.sandbox.files import File, read_tree
from glm_jax.envs.tasks.harbor import FETCH
from glm_jax.envs.tasks.task import Task, read_text

_GRAM = 12  # words of a passage
_LEAK = 0.5  # share of the solution's passages that may stand in a file that a solver or a verifier's author sees
_FEWEST = 8  # passages: a shorter solution shares some with anything
_SECRETS = {
    "a private key": re.compile(rb"-----BEGIN [A-Z ]*PRIVATE KEY-----"),
    "an access key": re.compile(rb"\b(AKIA[0-9A-Z]{16}|gh[pousr]_\w{36}|sk-[\w-]{32,}|xox[abp]-[\w-]{20,}|hf_\w{30,})"),
}
_SECRET_NAMES = re.compile(r"(^|/)(\.env|id_rsa|id_ed25519|\.netrc|\.pypirc|\.aws/credentials)$")


def lint(task: Task) -> list[str]:
    """What is wrong, each in one sentence."""
    return [*_setting(task), *_secrets(task), *_leaks(task), *_fetching(task)]


def _setting(task: Task) -> Iterator[str]:
    if not task.separate:
        yield "the verifier shares the agent's box: set verifier.environment_mode = 'separate'"
    if "solve.sh" not in task.solution:
        yield "there is no oracle: write solution/solve.sh"
    if len(task.instruction.split()) < 10:
        yield "instruction.md says next to nothing"
    if not task.artifacts:
        yield "artifacts is empty: the verifier would be handed nothing"
    for path in sorted(read_tree(task.folder / "environment")) if (task.folder / "environment").is_dir() else ():
        if ".git/" in f"/{path}":
            yield "environment/ holds a git repository, whose history may hold the solution: keep the files alone"
            break
    dockerfile = task.folder / "environment" / "Dockerfile"
    if dockerfile.exists():
        for number, line in enumerate(read_text(dockerfile).splitlines(), 1):
            if re.search(r"\bpip3? install\b", line) and not re.search(r"==", line):
                yield f"environment/Dockerfile:{number} installs a package without its version"


def _secrets(task: Task) -> Iterator[str]:
    for path, file in task.start.items():
        if _SECRET_NAMES.search(path):
            yield f"{path} has the name of a file of secrets"
        for what, pattern in _SECRETS.items():
            if pattern.search(file.data):
                yield f"{path} holds what looks like {what}"


def _leaks(task: Task) -> Iterator[str]:
    """Parts of the solution in what others see: a copy left in the environment, a verifier made from the oracle."""
    own = _passages(task.solution)
    if len(own) < _FEWEST:
        return
    seen: dict[str, Mapping[str, File]] = {"instruction.md": {"": File(task.instruction.encode())}}
    seen |= {path: {path: file} for path, file in task.start.items()}
    seen |= {f"tests/{path}": {path: file} for path, file in task.tests.items()}
    for name, tree in seen.items():
        share = len(own & _passages(tree)) / len(own)
        if share >= _LEAK:
            yield f"{name} holds {share:.0%} of the solution's text"


def _passages(tree: Mapping[str, File]) -> set[tuple[str, ...]]:
    found = set()
    for file in tree.values():
        words = re.findall(r"\w+|[^\w\s]", file.data.decode(errors="replace").lower())
        found |= {tuple(words[i : i + _GRAM]) for i in range(len(words) - _GRAM + 1)}
    return found


def _fetching(task: Task) -> Iterator[str]:
    scripts = {"solution": task.solution} | {f"partials/{name}": tree for name, tree in task.partials.items()}
    for folder, tree in scripts.items():
        for path, file in tree.items():
            if path.endswith(".sh") and (match := FETCH.search(file.data.decode(errors="replace"))):
                yield f"{folder}/{path} wants the network: {match[0].strip()!r}"
