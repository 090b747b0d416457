"""The shapes and dtypes that signatures promise hold wherever the program calls them, while it is traced."""

from __future__ import annotations

import functools
import importlib
import inspect
import pkgutil
import types
import typing

import jax
import jax.numpy as jnp
import jaxtyping

import glm_jax
from glm_jax.learn.batch import RL
from glm_jax.model.transformer import forward
from tests.model.tiny import random_params, random_tokens, tiny_config
from tests.program.runs import inbox, program

ROOMS = ("model", "rollout", "learn", "sharding", "program")


def modules() -> list[types.ModuleType]:
    found = []
    for room in ROOMS:
        package = importlib.import_module(f"glm_jax.{room}")
        names = [info.name for info in pkgutil.iter_modules(package.__path__)]
        found += [importlib.import_module(f"glm_jax.{room}.{name}") for name in names]
    return found


def is_shape(hint) -> bool:
    return inspect.isclass(hint) and issubclass(hint, jaxtyping.AbstractArray)


def fits(value, hint) -> bool:
    """Whether a value is what a hint says; only hints of array shapes are looked at, and those that hold them."""
    if is_shape(hint):
        try:
            return isinstance(value, hint)
        except jaxtyping.AnnotationError:  # a dimension in terms of others that nothing has bound
            return False
    arguments = typing.get_args(hint)
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        return not any(map(is_shape, arguments)) or any(
            (value is None and a is type(None)) or (is_shape(a) and isinstance(value, a)) for a in arguments
        )
    if typing.get_origin(hint) is tuple and Ellipsis not in arguments:
        return all(fits(v, a) for v, a in zip(value, arguments, strict=True))
    return True


def checked(function, hints, called: set[str], wrong: list[str]):
    signature = inspect.signature(function)

    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        name = f"{function.__module__}.{function.__qualname__}"
        with jaxtyping.jaxtyped("context"):  # dimensions of one name are equal throughout one call
            for argument, value in signature.bind(*args, **kwargs).arguments.items():
                if not fits(value, hints.get(argument)):
                    wrong.append(f"{name}: {argument} is {jax.tree.map(jnp.shape, value)}, not {hints[argument]}")
            result = function(*args, **kwargs)
            if not fits(result, hints.get("return")):
                wrong.append(f"{name} returns {jax.tree.map(jnp.shape, result)}, not {hints['return']}")
        called.add(name)
        return result

    return wrapper


def test_every_signature_that_the_program_reaches_tells_the_truth(monkeypatch):
    called: set[str] = set()
    wrong: list[str] = []
    replaced = {}
    for module in modules():
        for value in vars(module).values():
            if inspect.isfunction(value) and value.__module__ == module.__name__:
                try:
                    hints = typing.get_type_hints(value)
                except (ValueError, NameError) as error:
                    wrong.append(f"{module.__name__}.{value.__name__} has a signature that is none: {error}")
                    continue
                if any(is_shape(a) for hint in hints.values() for a in (hint, *typing.get_args(hint))):
                    replaced[value] = checked(value, hints, called, wrong)
    for module in (*modules(), glm_jax):
        for name, value in list(vars(module).items()):
            if inspect.isfunction(value) and value in replaced:
                monkeypatch.setattr(module, name, replaced[value])

    built = program({})
    jax.eval_shape(built.round, jax.eval_shape(built.init, 0), inbox(mode=RL))
    config = tiny_config()
    tokens = random_tokens(config, 2, 9)
    checked_forward = replaced[forward]
    jax.eval_shape(lambda p, t: checked_forward(p, config, t, t > 5, trace=True), random_params(config), tokens)
    assert not wrong, "\n".join(dict.fromkeys(wrong))
    assert len(called) > 30
    for reached in (
        "model.selection.select",
        "model.experts.routed_mlp",
        "rollout.sampling.sample",
        "learn.advantage.gae",
    ):
        assert f"glm_jax.{reached}" in called
