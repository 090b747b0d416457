"""The tools of an agent: what they are called, what they want, and what they do in a box."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from glm_jax.envs.agents.chat import ToolCall
from glm_jax.envs.sandbox.box import Box
from glm_jax.envs.sandbox.errors import BoxError
from glm_jax.envs.sandbox.files import File
from glm_jax.envs.sandbox.limits import Output

_LARGEST = 8 << 20  # bytes of a file that str_replace edits


@dataclass(frozen=True)
class Observation:
    """What a call came to, as the agent reads it. An error is one more observation: the agent may do better next.

    `text` is UTF-8 whatever the agent named its files: what is no text is shown as \\udcff.
    """

    text: str
    error: bool = False
    submitted: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "text", self.text.encode(errors="backslashreplace").decode())


class _Wrong(ValueError):
    """A call that cannot be carried out, in words for the agent."""


class Tools:
    """The tools on one box; `command_limit` is in seconds, `output_bytes` of each stream of an observation."""

    def __init__(
        self,
        box: Box,
        workdir: str,
        env: Mapping[str, str] | None = None,
        command_limit: float = 120.0,
        output_bytes: int = 16384,
    ) -> None:
        self._box, self._workdir, self._env = box, workdir, dict(env or {})
        self._command_limit, self._output_bytes = command_limit, output_bytes

    def call(self, call: ToolCall, seconds: float | None = None) -> Observation:
        """Carries a call out, within `seconds` if given. Raises BoxDied only: all else is told to the agent."""
        try:
            if call.problem:
                raise _Wrong(call.problem)
            arguments = _arguments(call)
            limit = self._command_limit if seconds is None else min(self._command_limit, seconds)
            return getattr(self, f"_{call.name}")(limit=limit, **arguments)
        except (_Wrong, BoxError) as error:
            return Observation(f"error: {error}", error=True)

    def _bash(self, command: str, limit: float, timeout: float | None = None) -> Observation:
        if timeout is not None and timeout <= 0:
            raise _Wrong(f"timeout is {timeout}; it is a number of seconds above 0")
        limit = limit if timeout is None else min(limit, timeout)
        done = self._box.run(command, limit, env=self._env, cwd=self._workdir, output_bytes=self._output_bytes)
        parts = [str(done.out), f"[stderr]\n{done.err}" if done.err.total else ""]
        if done.timed_out:
            parts.append(f"[killed after {limit:g} s, with all that it started]")
        elif done.out_of_memory:
            parts.append(f"[out of memory: {self._box.limits.memory_mb} MiB; exit code {done.code}]")
        else:
            parts.append(f"[exit code {done.code}]")
        return Observation("\n".join(part.rstrip("\n") for part in parts if part))

    def _read_file(self, path: str, limit: float) -> Observation:
        data, size = self._box.get(self._place(path), self._output_bytes)
        return Observation(str(Output(data, b"", size)))

    def _write_file(self, path: str, content: str, limit: float) -> Observation:
        data = content.encode(errors="replace")
        self._box.put({self._place(path): File(data)})
        return Observation(f"{len(data)} bytes written to {path}")

    def _str_replace(self, path: str, old: str, new: str, limit: float) -> Observation:
        place = self._place(path)
        data, size = self._box.get(place, _LARGEST)
        if size > len(data):
            raise _Wrong(f"{path} has {size} bytes; str_replace edits files of up to {_LARGEST}")
        # Half a character (a lone surrogate) stands in no text; what is written has a question mark for it.
        before, after = old.encode(errors="surrogatepass"), new.encode(errors="replace")
        count = data.count(before) if old else 0
        if count != 1:
            raise _Wrong(f"old stands {count} times in {path}; it has to stand there exactly once")
        self._box.put({place: File(data.replace(before, after))})
        return Observation(f"{path} edited")

    def _submit(self, limit: float) -> Observation:
        return Observation("submitted", submitted=True)

    def _place(self, path: str) -> str:
        if "\0" in path:
            raise _Wrong("a path holds no zero byte")
        return str(PurePosixPath(self._workdir, path))


def _function(name: str, about: str, required: Mapping[str, str], optional: Mapping[str, str] | None = None) -> dict:
    """A tool in OpenAI's form; every argument is a text but `timeout`."""
    kinds = {"timeout": "number"}
    properties = {
        key: {"type": kinds.get(key, "string"), "description": text}
        for key, text in {**required, **(optional or {})}.items()
    }
    parameters = {
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
    }
    return {"type": "function", "function": {"name": name, "description": about, "parameters": parameters}}


SCHEMAS = (
    _function(
        "bash",
        "Runs a command in bash, in the work folder. Processes in the background stay.",
        {"command": "the command"},
        {"timeout": "seconds after which it is killed with all that it started"},
    ),
    _function("read_file", "Shows a file.", {"path": "absolute, or relative to the work folder"}),
    _function(
        "write_file", "Writes a file, and the folders above it.", {"path": "where", "content": "the whole content"}
    ),
    _function(
        "str_replace",
        "Replaces a text in a file; it has to stand there exactly once.",
        {"path": "the file", "old": "the text as it is", "new": "what takes its place"},
    ),
    _function("submit", "Ends the task: what is in the box now is judged.", {}),
)
_BY_NAME = {schema["function"]["name"]: schema["function"]["parameters"] for schema in SCHEMAS}
_KINDS: dict[str, Callable[[Any], bool]] = {
    "string": lambda value: isinstance(value, str),
    "number": lambda value: isinstance(value, int | float) and not isinstance(value, bool),
}


def typed(name: str, texts: Mapping[str, str]) -> dict[str, Any]:
    """Arguments that were written as texts, numbers where the tool `name` wants them. What is none stays a text."""
    properties = _BY_NAME.get(name, {}).get("properties", {})
    found: dict[str, Any] = dict(texts)
    for key in texts:
        if properties.get(key, {}).get("type") == "number":
            with suppress(ValueError):
                found[key] = float(texts[key])
    return found


def _arguments(call: ToolCall) -> dict[str, Any]:
    """The arguments of a call. Raises _Wrong with what is wrong and what would be right."""
    if (schema := _BY_NAME.get(call.name)) is None:
        raise _Wrong(f"there is no tool {call.name!r}; there are {', '.join(_BY_NAME)}")
    try:
        arguments = json.loads(call.arguments or "{}")
    except (ValueError, RecursionError) as error:
        raise _Wrong(f"the arguments of {call.name} are no JSON: {str(error)[:200]}") from error
    if not isinstance(arguments, dict):
        raise _Wrong(f"the arguments of {call.name} are no object, but {str(arguments)[:100]}")
    wanted = ", ".join(schema["required"]) or "nothing"
    for key, value in arguments.items():
        if key not in schema["properties"]:
            raise _Wrong(f"{call.name} has no argument {key!r}; it wants {wanted}")
        if not _KINDS[kind := schema["properties"][key]["type"]](value):
            raise _Wrong(f"{call.name}: {key} is {str(value)[:100]}; it has to be a {kind}")
    if missing := [key for key in schema["required"] if key not in arguments]:
        raise _Wrong(f"{call.name} lacks {' and '.join(missing)}; it wants {wanted}")
    return arguments
