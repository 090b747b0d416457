"""Rooms import one way: cli -> bench, plan -> host -> io, program -> rollout, learn -> sharding -> model -> kernels."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
# A room may import itself and rooms of a lower level, never one of its own level or above.
LEVEL = {"pallas_kernels": 0, "model": 1, "sharding": 2, "rollout": 3, "learn": 3, "program": 4, "io": 4}
LEVEL |= {"host": 5, "plan": 6, "bench": 6, "cli": 7}
ALONE = {"config", "data", "envs", "report"}  # import nothing of ours; every room from host upwards may import them
ALONE_FROM = LEVEL["host"]
EVERYWHERE = {"text"}  # files beside the rooms that import nothing of ours


def room_of(module: str) -> str | None:
    """The room that a dotted module name lies in, or None where it is not ours."""
    parts = module.split(".")
    if parts[0] == "pallas_kernels":
        return "pallas_kernels"
    if parts[0] != "glm_jax":
        return None
    return parts[1] if len(parts) > 1 else "glm_jax"


def modules_imported(source: str, package: str) -> list[str]:
    """Dotted names of everything that a file of `package` imports, wherever in the file it does so."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, base] if base else above)
            # `from glm_jax import model` names a room in its second half
            found += [f"{base}.{alias.name}" for alias in node.names] if base == "glm_jax" else [base]
    return found


def may_import(room: str, other: str) -> bool:
    """Whether a file of `room` may import from `other`; both are names of rooms."""
    if room == other or other in EVERYWHERE:
        return True
    if room in ALONE:
        return False
    if other in ALONE:
        return LEVEL[room] >= ALONE_FROM
    return other in LEVEL and LEVEL[other] < LEVEL[room]


def files() -> list[Path]:
    """Every file of a room. The facade glm_jax/__init__.py and __main__.py belong to none."""
    inside = [path for path in (ROOT / "glm_jax").rglob("*.py") if path.parent != ROOT / "glm_jax"]
    return sorted([*inside, *(ROOT / "pallas_kernels").rglob("*.py")])


def test_rooms_import_one_way():
    wrong = []
    for path in files():
        package = ".".join(path.relative_to(ROOT).parent.parts)
        room = room_of(package)
        assert room in LEVEL or room in ALONE, f"{path}: {room} is no room that this test knows; place it in LEVEL"
        for module in modules_imported(path.read_text(), package):
            other = room_of(module)
            if other is not None and not may_import(room, other):
                wrong.append(f"{path.relative_to(ROOT)}: {room} imports {module}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("room", "source", "allowed"),
    [
        ("host", "from glm_jax.config.strict import read", True),
        ("host", "from glm_jax.data.tasks import Task", True),
        ("learn", "import glm_jax.model.transformer", True),
        ("learn", "from glm_jax.rollout import slots", False),
        ("model", "def f():\n    from glm_jax.learn import batch", False),
        ("model", "from ..host.loop import run", False),
        ("data", "from glm_jax.config.strict import ConfigError", False),
        ("learn", "from glm_jax.report.metrics import MetricsWriter", False),
        ("pallas_kernels", "import glm_jax.model", False),
        ("model", "from glm_jax import host", False),
        ("data", "from glm_jax.text import read_text", True),
        ("program", "from glm_jax import load", False),
    ],
)
def test_the_order_is_read_from_every_form_of_import(room: str, source: str, allowed: bool):
    package = room if room == "pallas_kernels" else f"glm_jax.{room}"
    ours = [room_of(module) for module in modules_imported(source, package) if room_of(module)]
    assert ours
    assert all(may_import(room, other) for other in ours) == allowed
