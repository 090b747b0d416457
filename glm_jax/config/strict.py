"""A strict reader of configs: nested values into frozen dataclasses, with every mistake told in one error.

A schema is a frozen dataclass. Its fields may be bool, int, float, str, dict, Any, `Literal[...]`, `T | None`,
`tuple[T, ...]`, `tuple[A, B]` and further dataclasses. A schema may have a method `check(self) -> list[str]` for what
only several fields together can tell: one sentence per problem, which is reported beside the others.
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import json
import math
import types
import typing
from collections.abc import Mapping
from typing import Any, Literal, TypeVar, get_args, get_origin

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

T = TypeVar("T")


class ConfigError(ValueError):
    """A config that cannot be used. The message lists every problem, one a line, each with its key."""


class _Bad:
    """Stands where a value could not be read, so that reading goes on and finds the other problems."""


_BAD = _Bad()


def read(schema: type[T], values: Mapping[str, Any] | ConfigDict, where: str = "config") -> T:
    """Builds `schema` from `values`; `where` is the name of the whole in messages.

    An int is taken where a float is asked for and a list where a tuple is; nothing else is converted. A key that is
    absent takes the field's default. Raises ConfigError with all problems at once: unknown keys (with the nearest known
    one), wrong types, missing keys, and what the schemas' own `check` methods find.
    """
    problems: list[str] = []
    found = _dataclass(schema, values, where, problems)
    if problems:
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        raise ConfigError("\n".join([f"{count} in {where}:", *(f"  - {problem}" for problem in problems)]))
    return found


def default_config(schema: type) -> ConfigDict:
    """Every key of `schema` with its default, nested, so that a flag `--config.a.b=...` reaches each of them.

    A field that has no default, or None, becomes a placeholder of its type: it reads as None until it is set, and a
    flag's text is parsed as that type. An optional dataclass whose default is None stays None.
    """
    hints = typing.get_type_hints(schema)
    return ConfigDict({f.name: _start(hints[f.name], _default(f)) for f in dataclasses.fields(schema) if f.init})


def plain(value: Any) -> Any:
    """`value` as dicts, tuples and scalars only: dataclasses and ConfigDicts opened, lists made tuples."""
    if isinstance(value, ConfigDict):
        return {key: plain(value[key]) for key in value}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {key: plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return tuple(plain(inner) for inner in value)
    return value


def render(config: Any) -> str:
    """The config as lines `a.b.c = value` in the order of its fields, as `--dry_run` prints it."""
    return "\n".join(f"{key} = {value!r}" for key, value in _leaves("", plain(config)))


def fingerprint(config: Any) -> str:
    """sha256 (hex) of the config's canonical JSON: equal for equal values (1 is 1.0), whatever the order of keys."""
    text = json.dumps(_canonical(plain(config)), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _canonical(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _canonical(inner) for key, inner in value.items()}
    if isinstance(value, tuple):
        return [_canonical(inner) for inner in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _leaves(prefix: str, value: Any) -> list[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        return [leaf for key, inner in value.items() for leaf in _leaves(f"{prefix}.{key}" if prefix else key, inner)]
    return [(prefix, value)]


def _default(field: dataclasses.Field) -> Any:
    if field.default is not dataclasses.MISSING:
        return field.default
    return field.default_factory() if field.default_factory is not dataclasses.MISSING else dataclasses.MISSING


def _options(hint: Any) -> tuple[Any, ...]:
    """The members of a union, or the hint alone."""
    return get_args(hint) if get_origin(hint) in (typing.Union, types.UnionType) else (hint,)


def _start(hint: Any, default: Any) -> Any:
    """What a ConfigDict holds for a field of type `hint` before a run's config or a flag sets it."""
    kinds = [option for option in _options(hint) if option is not type(None)]
    if default is dataclasses.MISSING and dataclasses.is_dataclass(hint):
        return default_config(hint)
    if default is None or default is dataclasses.MISSING:
        kind = get_origin(kinds[0]) or kinds[0]
        kind = type(get_args(kinds[0])[0]) if kind is Literal else kind
        return placeholder(kind) if kind in (bool, int, float, str, tuple) else None
    if dataclasses.is_dataclass(default):
        inner = typing.get_type_hints(type(default))
        fields = [field for field in dataclasses.fields(default) if field.init]
        return ConfigDict({field.name: _start(inner[field.name], getattr(default, field.name)) for field in fields})
    # An int default of a float field would make ConfigDict refuse a flag's 1e-6.
    return float(default) if float in kinds and type(default) is int and int not in kinds else plain(default)


def _dataclass(schema: type, values: Any, where: str, problems: list[str]) -> Any:
    if isinstance(values, schema):
        values = {field.name: getattr(values, field.name) for field in dataclasses.fields(schema)}
    if not isinstance(values, (Mapping, ConfigDict)):
        problems.append(f"{where} is {_show(values)}; it wants a mapping with the keys of {schema.__name__}")
        return _BAD
    fields = {field.name: field for field in dataclasses.fields(schema) if field.init}
    for key in values:
        if key not in fields:
            near = difflib.get_close_matches(str(key), fields, n=1, cutoff=0.5)
            hint = f"did you mean {where}.{near[0]}?" if near else f"known here: {', '.join(fields)}"
            problems.append(f"{where}.{key} is no known key; {hint}")
    hints = typing.get_type_hints(schema)
    arguments, complete = {}, True
    for name, field in fields.items():
        place = f"{where}.{name}"
        unset = name not in values or (values[name] is None and type(None) not in _options(hints[name]))
        if not unset or (name in values and _default(field) is not dataclasses.MISSING):
            arguments[name] = _value(hints[name], values[name], place, problems)
        elif _default(field) is dataclasses.MISSING:
            problems.append(f"{place} is missing; set it to {_name(hints[name])}")
            arguments[name] = _BAD
        else:
            continue
        complete = complete and not _is_bad(arguments[name])
    if not complete:
        return _BAD
    try:
        made = schema(**arguments)
    except ValueError as error:
        problems.append(f"{where}: {error}")
        return _BAD
    if hasattr(made, "check"):
        problems.extend(f"{where}: {problem}" for problem in made.check())
    return made


def _is_bad(value: Any) -> bool:
    return value is _BAD or (isinstance(value, tuple) and any(_is_bad(inner) for inner in value))


def _value(hint: Any, value: Any, where: str, problems: list[str]) -> Any:
    """`value` read as `hint`; on a mismatch one line goes to `problems` and _BAD comes back."""
    options = _options(hint)
    if len(options) > 1:
        return _union(options, hint, value, where, problems)
    if dataclasses.is_dataclass(hint):
        return _dataclass(hint, value, where, problems)
    origin = get_origin(hint) or hint
    if origin is tuple:
        return _tuple(hint, value, where, problems)
    if origin is Literal:
        choices = get_args(hint)
        if any(value == choice and type(value) is type(choice) for choice in choices):
            return value
        near = difflib.get_close_matches(str(value), [str(choice) for choice in choices], n=1)
        more = f" (did you mean {near[0]!r}?)" if near else ""
        problems.append(f"{where} is {_show(value)}; it has to be {_name(hint)}{more}")
        return _BAD
    if hint is Any:
        return plain(value)
    if origin is dict and isinstance(value, (Mapping, ConfigDict)):
        return plain(value)
    if origin is float and isinstance(value, (int, float)) and not isinstance(value, bool):
        if not math.isnan(value):
            return float(value)
    elif isinstance(origin, type) and isinstance(value, origin) and (origin is bool or not isinstance(value, bool)):
        return value
    problems.append(f"{where} is {_show(value)}; it has to be {_name(hint)}")
    return _BAD


def _union(options: tuple[Any, ...], hint: Any, value: Any, where: str, problems: list[str]) -> Any:
    if value is None and type(None) in options:
        return None
    rest = [option for option in options if option is not type(None)]
    attempts: list[list[str]] = []
    for option in rest:
        attempts.append([])
        found = _value(option, value, where, attempts[-1])
        if not attempts[-1]:
            return found
    # With one option beside None its own message is the clearer one.
    problems.extend(attempts[0] if len(rest) == 1 else [f"{where} is {_show(value)}; it has to be {_name(hint)}"])
    return _BAD


def _tuple(hint: Any, value: Any, where: str, problems: list[str]) -> Any:
    inner = get_args(hint)
    if not isinstance(value, (list, tuple)):
        problems.append(f"{where} is {_show(value)}; it has to be {_name(hint)}")
        return _BAD
    if not inner:
        return plain(value)
    if inner[-1] is Ellipsis:
        inner = inner[:1] * len(value)
    elif len(inner) != len(value):
        problems.append(f"{where} is {_show(value)} with {len(value)} entries; it has to have {len(inner)}")
        return _BAD
    pairs = zip(inner, value, strict=True)
    return tuple(_value(kind, entry, f"{where}[{i}]", problems) for i, (kind, entry) in enumerate(pairs))


def _show(value: Any) -> str:
    text = repr(plain(value))
    return f"{text if len(text) <= 80 else text[:77] + '...'} ({type(value).__name__})"


def _name(hint: Any) -> str:
    """A type as a person reads it."""
    options = _options(hint)
    if len(options) > 1:
        return " or ".join(_name(option) for option in options)
    if hint is type(None):
        return "None"
    if get_origin(hint) is Literal:
        return "one of " + ", ".join(repr(choice) for choice in get_args(hint))
    if get_origin(hint) is tuple:
        inner = get_args(hint)
        if inner[-1] is Ellipsis:
            return f"a tuple of {_name(inner[0])}"
        return f"a tuple ({', '.join(_name(kind) for kind in inner)})"
    return getattr(hint, "__name__", str(hint))
