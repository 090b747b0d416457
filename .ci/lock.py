"""Writes requirements.lock: exact pins of the runtime, `envs` and `dev`, for Python 3.11 and for 3.12 and later.

    python .ci/lock.py python3.11 python3.12        (or `make lock`)

Each interpreter resolves pyproject.toml with pip, as on a machine that has nothing installed. A pin that both agree on
is written once; where they differ (jax 0.10 is the newest that Python 3.11 gets) each line carries a marker.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
EXTRAS = ("envs", "dev")
MARKERS = ("python_version < '3.12'", "python_version >= '3.12'")
HEADER = """\
# Exact versions that Makefile and CI install: the runtime with the extras {extras}.
# Written by `make lock`; do not edit.
"""


def requirements() -> list[str]:
    """What pyproject.toml asks for, extras included."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    found = list(project["dependencies"])
    for extra in EXTRAS:
        found += project["optional-dependencies"][extra]
    return found


def resolve(python: str) -> dict[str, str]:
    """name -> version of everything that `python`'s pip would install into an empty environment."""
    command = [python, "-m", "pip", "install", "-qq", "--dry-run", "--ignore-installed", "--report", "-"]
    done = subprocess.run(command + requirements(), stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise SystemExit(f"{python}: pip could not resolve pyproject.toml (its message stands above)")
    metadata = [item["metadata"] for item in json.loads(done.stdout)["install"]]
    return {re.sub(r"[-_.]+", "-", item["name"]).lower(): item["version"] for item in metadata}


def lock(old: dict[str, str], new: dict[str, str]) -> str:
    """The text of the lock: one line for a pin that both share, one with a marker for each that differs."""
    lines = []
    for name in sorted({*old, *new}):
        if old.get(name) == new.get(name):
            lines.append(f"{name}=={old[name]}")
            continue
        lines += [f"{name}=={pins[name]} ; {m}" for pins, m in zip((old, new), MARKERS, strict=True) if name in pins]
    return HEADER.format(extras=" and ".join(EXTRAS)) + "\n".join(lines) + "\n"


def main(arguments: list[str]) -> None:
    if len(arguments) != 2:
        raise SystemExit("usage: python .ci/lock.py PYTHON_3.11 PYTHON_3.12_OR_LATER")
    for python, wanted in zip(arguments, ("older", "newer"), strict=True):
        code = "import sys; print('older' if sys.version_info < (3, 12) else 'newer')"
        seen = subprocess.run([python, "-c", code], stdout=subprocess.PIPE, text=True, check=True).stdout.strip()
        if seen != wanted:
            raise SystemExit(f"{python} is the wrong Python here: give one of 3.11 first, then one of 3.12 or later")
    (ROOT / "requirements.lock").write_text(lock(*(resolve(python) for python in arguments)))


if __name__ == "__main__":
    main(sys.argv[1:])
