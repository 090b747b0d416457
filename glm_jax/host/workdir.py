"""To which run a workdir belongs, what of its config may still change, and what of a harmed one can be gone on from."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from glm_jax.config.strict import plain
from glm_jax.host.config import RunConfig
from glm_jax.host.errors import RunError
from glm_jax.host.stages import Stage, learning_rate
from glm_jax.io.checkpoints import CheckpointError, damage, read_host
from glm_jax.report.metrics import FILE as METRICS

logger = logging.getLogger(__name__)

CHECKPOINTS, LEDGER, CONFIG, LOG = "checkpoints", "ledger.jsonl", "config.json", "log.txt"
# What decides nothing of what was done; the first two move the numbers of later rollouts, and with them their tokens.
_MOVING = ("eval.", "checkpoint.")
_FREE = ("patience", "profile_rounds", "reward.workers", "tools.workers", "tools.at_once")
_ABSENT = "(absent)"


def flat(config: RunConfig) -> dict[str, Any]:
    """The config as JSON values under dotted keys, for comparing two of them."""

    def leaves(prefix: str, value: Any) -> dict[str, Any]:
        if isinstance(value, dict) and value:
            return {k: v for name, inner in value.items() for k, v in leaves(f"{prefix}.{name}", inner).items()}
        return {prefix[1:]: value}

    return json.loads(json.dumps(leaves("", plain(config))))


def begun(workdir: Path) -> bool:
    """Whether something was trained or recorded here: only then does the workdir belong to a run."""
    recorded = (workdir / name for name in (LEDGER, METRICS))
    steps = (path for path in (workdir / CHECKPOINTS).glob("*") if path.name.isdigit())
    return any(path.is_file() and path.stat().st_size for path in recorded) or any(steps)


def check_workdir(workdir: Path, config: RunConfig, host: dict | None = None) -> list[str]:
    """What the config changes of the run that the workdir holds, one line per key; `host`: of its newest checkpoint.

    Raises CheckpointError where the workdir holds a run of another config, naming every key that may not change.
    """
    if not begun(workdir):
        return []
    saved = _read_config(workdir)
    if saved is None and host is None:
        raise CheckpointError(
            f"{workdir / CONFIG} is missing or damaged, and no checkpoint tells whose run this is: there is nothing to "
            "go on from. Restore it, or use another --workdir."
        )
    found = [
        _changes(was, config, workdir, (host or {}).get("step", 0))
        for was in (saved, (host or {}).get("config"))
        if was is not None
    ]
    return sorted({line for lines in found for line in lines})


def _read_config(workdir: Path) -> dict[str, Any] | None:
    path = workdir / CONFIG
    try:
        saved = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        logger.warning("%s cannot be read (%s): the newest checkpoint tells the run's config", path, error)
        return None
    return saved if isinstance(saved, dict) else None


def _changes(was: dict[str, Any], config: RunConfig, workdir: Path, step: int) -> list[str]:
    now = flat(config)
    last = config.laid_out[-1]
    steps = f"{last.name}.steps"
    free = _FREE if config.deterministic else (*_FREE, *_MOVING)
    frozen, changed = [], []
    for key in sorted({*was, *now}):
        old, new = was.get(key, _ABSENT), now.get(key, _ABSENT)
        if old == new:
            continue
        line = f"{key}: {old} there, {new} now"
        if key == steps and isinstance(old, int):
            if reason := _past_differs(last, old, step):
                frozen.append(f"{line} ({reason})")
                continue
        elif not key.startswith(free):
            frozen.append(f"{line} (deterministic = True: it moves bits)" if key.startswith(_MOVING) else line)
            continue
        changed.append(line)
    if frozen:
        lines = [f"  {line}" for line in frozen]
        raise CheckpointError(
            "\n".join([f"{workdir} holds a run of another config:", *lines, "Use its config, or another --workdir."])
        )
    return changed


def _past_differs(last: Stage, old: int, step: int) -> str | None:
    """Why the last stage cannot have another number of steps than `old` once the run is at `step`, or None."""
    if step > last.start + last.config.steps:
        return f"step {step - last.start} of {last.name} is made already"
    for name in ("policy_lr", "critic_lr"):
        schedule = getattr(last.config, name)
        made = range(step - last.start)
        if any(learning_rate(schedule, i, old) != learning_rate(schedule, i, last.config.steps) for i in made):
            return f"{last.name}.{name} is a {schedule.shape} over all steps: those already made had other rates"
    return None


def check_ledger(workdir: Path, step: int, host: dict) -> None:
    """Raises RunError where the ledger is not as long as the checkpoint says, naming older ones that go without."""
    path, folder = workdir / LEDGER, workdir / CHECKPOINTS
    present = path.stat().st_size if path.is_file() else 0
    if present >= host["offset"]:
        return
    older = [
        number
        for number in sorted((int(p.name) for p in folder.iterdir() if p.name.isdigit()), reverse=True)
        if damage(folder / str(number)) is None and read_host(folder / str(number))["offset"] <= present
    ]
    if older:
        remedy = f"move the checkpoints after {older[0]} out of {folder}, and the run goes on from step {older[0]}"
    else:
        remedy = "no older checkpoint goes without it, so start in an empty --workdir"
    state = f"holds {present} bytes" if path.is_file() else "is missing"
    raise RunError(
        f"{path} {state}, but checkpoint {step} was taken at {host['offset']}: it was cut, removed or replaced. "
        f"Restore it; otherwise {remedy}."
    )
