"""Reads Harbor task folders (schema 1.0 to 1.4), without the package and without Docker.

    task.toml  instruction.md  environment/  solution/solve.sh  tests/test.sh

and of our own: `partials/NAME/solve.sh` and `attacks/NAME/solve.sh`, beside each of which the solution's files lie, its
solve.sh by the name of oracle.sh; and the table `[metadata.glm_jax]`, which Harbor leaves alone. In it
`base = "host-python"` says that `environment/files/` is the work folder's content and that no Dockerfile is needed;
`binary = false` that rewards between 0 and 1 are meant.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from glm_jax.envs.sandbox.files import File, placed, read_tree
from glm_jax.envs.sandbox.limits import Limits
from glm_jax.envs.tasks.dockerfile import Recipe, follow
from glm_jax.envs.tasks.task import NeedsContainer, Task, TaskError, read_text

SCHEMAS = ("1.0", "1.1", "1.2", "1.3", "1.4")
_TAKEN = (
    "/usr",
    "/bin",
    "/sbin",
    "/lib",
    "/lib64",
    "/etc",
    "/proc",
    "/dev",
    "/opt",
    "/tests",
    "/solution",
    "/logs",
    "/grader",
)
_HANDED_OVER = ("/logs/artifacts", "/logs/agent")
# What a test script does when it fetches its runner: it would fail in a box for no fault of the agent's.
FETCH = re.compile(
    r"^(?!\s*#).*?\b(apt-get|apt|apk|yum|dnf|curl|wget|uvx|git\s+clone|npm\s+(i|install)|"
    r"(uv\s+)?pip3?\s+install|uv\s+(run|add|sync|init)|cargo\s+install)\b",
    re.M,
)
_KNOWN = {
    "": {"schema_version", "version", "task", "metadata", "agent", "verifier", "environment", "solution", "artifacts"},
    "verifier": {"timeout_sec", "environment_mode", "env", "collect", "user"},
    "agent": {"timeout_sec", "user"},
    "environment": {
        *("build_timeout_sec", "cpus", "memory_mb", "memory", "storage_mb", "storage", "allow_internet"),
        *("network_mode", "env", "workdir", "docker_image", "gpus", "gpu_types", "healthcheck", "os"),
    },
}
_MOST_MIB = 1 << 20
_UNITS = {"": 1 / 2**20, "K": 1 / 2**10, "M": 1, "G": 2**10, "T": 2**20}


def read_task(folder: Path) -> Task:
    """The task of a folder. Raises TaskError where it is malformed, NeedsContainer where a box will not do."""
    path = folder / "task.toml"
    if not path.is_file():
        raise TaskError(f"{folder} is no task: it has no task.toml")
    try:
        data = tomllib.loads(read_text(path))
    except tomllib.TOMLDecodeError as error:
        raise TaskError(f"{path}: {error}") from error
    except RecursionError as error:
        raise TaskError(f"{path}: nested too deeply") from error
    reader = _Reader(path, data)
    version = str(reader.get("schema_version", str, reader.get("version", str, "1.0")))
    if version not in SCHEMAS:
        raise TaskError(f"{path}: schema_version is {version!r}; this reads {SCHEMAS[0]} to {SCHEMAS[-1]}")
    _refuse_containers(reader, folder)
    own = reader.get("metadata.glm_jax", dict, {})
    recipe = _recipe(reader, folder, own)
    workdir = reader.get("environment.workdir", str, recipe.workdir)
    _check_workdir(path, workdir)
    tests = _tree(folder / "tests")
    if "test.sh" not in tests:
        raise TaskError(f"{folder} has no tests/test.sh, which writes the reward")
    _refuse_fetching(folder)
    solution = _tree(folder / "solution")
    beside = {"oracle.sh" if path == "solve.sh" else path: file for path, file in solution.items()}
    instruction = folder / "instruction.md"
    if not instruction.is_file():
        raise TaskError(f"{folder} has no instruction.md, which tells the agent what to do")
    mode = reader.get("verifier.environment_mode", str, "shared")
    if mode not in ("shared", "separate"):
        raise TaskError(f"{path}: verifier.environment_mode is {mode!r}; it is 'separate' or 'shared'")
    return Task(
        folder=folder,
        name=reader.get("task.name", str, folder.resolve().name),
        instruction=read_text(instruction),
        workdir=workdir,
        env=recipe.env | reader.strings("environment.env"),
        start=recipe.start,
        steps=tuple(recipe.steps),
        tests=tests,
        solution=solution,
        partials=_scripts(folder / "partials", beside),
        attacks=_scripts(folder / "attacks", beside),
        artifacts=_artifacts(reader, workdir),
        collect=_collect(reader),
        separate=mode == "separate",
        binary=_typed(f"{path}: metadata.glm_jax.binary", own.get("binary", True), bool),
        agent_timeout=reader.seconds("agent.timeout_sec", 600.0),
        verifier_timeout=reader.seconds("verifier.timeout_sec", 600.0),
        verifier_env=reader.strings("verifier.env"),
        limits=Limits(
            memory_mb=reader.megabytes("environment.memory", 1024),
            disk_mb=min(reader.megabytes("environment.storage", 128), 1024),
        ),
        metadata=reader.get("metadata", dict, {}),
        warnings=tuple(_warnings(reader)),
    )


class _Reader:
    """Values of task.toml by dotted name, of the type that is wanted."""

    def __init__(self, path: Path, data: Mapping[str, Any]) -> None:
        self.path, self.data = path, data

    def get(self, name: str, kind: type, default: Any) -> Any:
        here: Any = self.data
        for part in name.split("."):
            if not isinstance(here, dict):
                raise TaskError(f"{self.path}: {name} stands in something that is no table")
            if part not in here:
                return default
            here = here[part]
        return _typed(f"{self.path}: {name}", here, kind)

    def seconds(self, name: str, default: float) -> float:
        value = self.get(name, float, default)
        if not 0 < value < 1e6:
            raise TaskError(f"{self.path}: {name} is {value}; it is a number of seconds above 0")
        return value

    def strings(self, name: str) -> dict[str, str]:
        """A table of texts. A value `${NAME}` would be the host's own variable, which no box is given."""
        table = self.get(name, dict, {})
        for key, value in table.items():
            _typed(f"{self.path}: {name}.{key}", value, str)
            if value.startswith("${"):
                raise TaskError(f"{self.path}: {name}.{key} is {value}; boxes get no variable of the host's: write it")
        return table

    def megabytes(self, name: str, default: int) -> int:
        """`NAME_mb`, or its older form `NAME = "4G"`."""
        if (value := self.get(f"{name}_mb", int, None)) is not None:
            return self._mebibytes(name, value)
        if (text := self.get(name, str, None)) is None:
            return default
        if not (match := re.fullmatch(r"(\d+(?:\.\d+)?)([KMGT]?)i?B?", text)):
            raise TaskError(f"{self.path}: {name} is {text!r}; it looks like '4G' or '512M'")
        return self._mebibytes(name, max(1, float(match[1]) * _UNITS[match[2]]))

    def _mebibytes(self, name: str, value: float) -> int:
        """More than any machine has would leave a box without a cap."""
        if not 1 <= value <= _MOST_MIB:
            raise TaskError(f"{self.path}: {name} is {value} MiB; it is 1 to {_MOST_MIB}")
        return int(value)


def _typed(what: str, value: Any, kind: type) -> Any:
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        names = {str: "a text", dict: "a table", float: "a number", int: "an integer", bool: "true or false"}
        raise TaskError(f"{what} is {value!r}; it has to be {names.get(kind, 'a list')}")
    return value


def _refuse_containers(reader: _Reader, folder: Path) -> None:
    if image := reader.get("environment.docker_image", str, None):
        raise NeedsContainer(reader.path, _line(reader.path, "docker_image"), f"docker_image = {image!r}")
    if reader.get("environment.gpus", int, 0):
        raise NeedsContainer(reader.path, _line(reader.path, "gpus"), "GPUs")
    if reader.get("environment.os", str, "linux").lower() != "linux":
        raise NeedsContainer(reader.path, _line(reader.path, "os"), "another system than Linux")
    for name in ("docker-compose.yaml", "docker-compose.yml", "compose.yaml"):
        if (folder / "environment" / name).exists():
            raise NeedsContainer(folder / "environment" / name, None, "docker-compose")
    if (folder / "tests" / "Dockerfile").exists():
        follow(folder / "tests" / "Dockerfile")  # which says what a box cannot do
    if (folder / "steps").exists():
        raise NeedsContainer(folder / "steps", None, "tasks of several steps, which are not read yet")


def _recipe(reader: _Reader, folder: Path, own: Mapping[str, Any]) -> Recipe:
    """What makes the start state: the Dockerfile, or plain files where the task says so."""
    base = own.get("base")
    if base is None:
        if not (folder / "environment" / "Dockerfile").is_file():
            raise TaskError(
                f"{folder} has neither environment/Dockerfile nor [metadata.glm_jax] base = 'host-python' in task.toml"
            )
        return follow(folder / "environment" / "Dockerfile")
    if base != "host-python":
        raise TaskError(
            f"{reader.path}: metadata.glm_jax.base is {base!r}; the one base without Docker is 'host-python'"
        )
    workdir = reader.get("environment.workdir", str, "/app")
    return Recipe(workdir=workdir, start=placed(_tree(folder / "environment" / "files"), workdir))


def _check_workdir(path: Path, workdir: str) -> None:
    pure = PurePosixPath(workdir)
    if not pure.is_absolute() or pure == PurePosixPath("/") or ".." in pure.parts or "\0" in workdir:
        raise TaskError(
            f"{path}: the work folder is {workdir!r}; it has to be an absolute folder below /, such as /app"
        )
    if any(pure.is_relative_to(taken) or PurePosixPath(taken).is_relative_to(pure) for taken in _TAKEN):
        raise TaskError(f"{path}: the work folder is {workdir!r}, which a box needs itself; /app is usual")


def _refuse_fetching(folder: Path) -> None:
    for path in sorted((folder / "tests").rglob("*.sh")):
        text = path.read_text(errors="replace")
        if match := FETCH.search(text):
            line = text.count("\n", 0, match.end()) + 1
            raise NeedsContainer(path, line, f"{match[0].strip()!r} fetches from the network, which boxes have not")


def _artifacts(reader: _Reader, workdir: str) -> tuple[str, ...]:
    """Absolute paths; without a list, the whole work folder."""
    found = []
    for entry in reader.get("artifacts", list, [workdir]):
        source = entry.get("source") if isinstance(entry, dict) else entry
        if not isinstance(source, str) or ".." in PurePosixPath(source).parts or "\0" in source:
            raise TaskError(f"{reader.path}: artifacts holds {entry!r}; an entry is a path, or a table with a source")
        path = PurePosixPath(workdir, source)
        mine = any(path.is_relative_to(log) for log in _HANDED_OVER)
        if path == PurePosixPath("/") or (not mine and any(path.is_relative_to(taken) for taken in _TAKEN)):
            raise TaskError(
                f"{reader.path}: artifacts holds {source!r}, which is no agent's to write; "
                f"{', '.join(_HANDED_OVER)} and folders of the task's own are"
            )
        found.append(str(path))
    return tuple(found)


def _collect(reader: _Reader) -> tuple[str, ...]:
    commands = []
    for hook in reader.get("verifier.collect", list, []):
        if not isinstance(hook, dict) or not isinstance(hook.get("command"), str):
            raise TaskError(f"{reader.path}: verifier.collect holds {hook!r}; a hook is a table with a command")
        if hook.get("service", "main") != "main":
            raise NeedsContainer(reader.path, _line(reader.path, "service"), f"service {hook['service']!r}")
        commands.append(hook["command"])
    return tuple(commands)


def _warnings(reader: _Reader) -> list[str]:
    found = []
    if reader.get("verifier.environment_mode", str, "shared") == "shared":
        found.append("its verifier shares the agent's box: a reward of it trains nothing")
    if reader.get("environment.allow_internet", bool, False) or reader.get(
        "environment.network_mode", str, "no-network"
    ) not in ("no-network", "none"):
        found.append("it asks for the network, and runs without")
    if reader.get("environment.healthcheck", dict, None) is not None:
        found.append("its health check is not run")
    for table, known in _KNOWN.items():
        here = reader.get(table, dict, {}) if table else reader.data
        for key in sorted(here.keys() - known):
            found.append(f"{table + '.' if table else ''}{key} is not known and has no effect")
    return found


def _scripts(folder: Path, beside: Mapping[str, File]) -> dict[str, dict[str, File]]:
    """The trees of a folder's subfolders, each with a solve.sh that may use what lies beside it."""
    found = {}
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        found[path.name] = {**beside, **_tree(path)}
        if "solve.sh" not in found[path.name]:
            raise TaskError(f"{path} has no solve.sh")
    return found


def _tree(folder: Path) -> dict[str, File]:
    try:
        return read_tree(folder)
    except ValueError as error:
        raise TaskError(str(error)) from error


def _line(path: Path, key: str) -> int | None:
    lines = read_text(path).splitlines()
    return next((i for i, line in enumerate(lines, 1) if line.strip().startswith(key)), None)
