"""The lock pins what pyproject.toml asks for, on every Python that the project supports."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize("python", ["3.11", "3.12", "3.13"])
def test_every_requirement_is_pinned_to_a_version_that_it_allows(python: str):
    environment = {"python_version": python}
    pins = {}
    for line in (ROOT / "requirements.lock").read_text().splitlines():
        if not line or line.startswith("#"):
            continue
        pin = Requirement(line)
        if pin.marker is None or pin.marker.evaluate(environment):
            assert canonicalize_name(pin.name) not in pins, f"{pin.name} is pinned twice"
            pins[canonicalize_name(pin.name)] = str(pin.specifier).removeprefix("==")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    for line in [*project["dependencies"], *extras["envs"], *extras["dev"]]:
        wanted = Requirement(line)
        assert wanted.specifier.contains(pins[canonicalize_name(wanted.name)]), f"{line}: run `make lock`"
