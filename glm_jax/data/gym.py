"""Questions from reasoning-gym's generators. It takes seconds to import, so functions import it when called."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import fields
from functools import cache
from typing import Any

from glm_jax.data.errors import DataError

# A family counts as exhausted after this many draws in a row that gave nothing new.
PATIENCE = 2000


def draw(
    family: str, settings: dict[str, Any], start: int, count: int, keep: Callable[[dict], bool]
) -> list[tuple[int, dict]]:
    """`count` entries that `keep` accepts, as (index, entry), from the family's generator seeded with `start`.

    Raises DataError for an unknown family or setting, and when too few entries are accepted.
    """
    dataset = _dataset(family, settings, start)
    found: list[tuple[int, dict]] = []
    index = last_new = 0
    while len(found) < count:
        entry = dataset[index]
        if keep(entry):
            found.append((index, entry))
            last_new = index
        index += 1
        if index - last_new > PATIENCE:
            raise DataError(
                f"family {family!r} gave {len(found)} distinct questions in {index} draws and {count} are wanted; "
                f"lower tasks.train_size or tasks.eval_size, or widen the family's settings (now {settings or 'none'})"
            )
    return found


def load_gym() -> None:
    """Imports reasoning-gym. Raises DataError, which says how to install it, where it is not there."""
    try:
        import reasoning_gym  # noqa: F401
    except ImportError as error:
        raise DataError(
            f"reasoning-gym cannot be imported ({error}); install it with: pip install 'glm-jax[envs]'"
        ) from error


@cache
def scorer(family: str) -> Callable[[str | None, dict], float]:
    """reasoning-gym's own scorer of a family, of (answer, entry) -> float in [0, 1]."""
    _known(family)
    import reasoning_gym

    return reasoning_gym.get_score_answer_fn(family)


def _dataset(family: str, settings: dict[str, Any], start: int) -> Any:
    _, config_class = _known(family)
    import reasoning_gym

    known = {entry.name for entry in fields(config_class)} - {"seed", "size"}
    for name in settings:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            more = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(sorted(known))}"
            raise DataError(f"family {family!r} has no setting {name!r}; {more}")
    try:
        # Nothing is allocated by size; it only has to lie beyond every index that is drawn.
        return reasoning_gym.create_dataset(family, **settings, seed=start, size=1 << 30)
    except (AssertionError, TypeError, ValueError) as error:
        raise DataError(f"family {family!r} refuses its settings {settings}: {error}") from error


def _known(family: str) -> tuple[type, type]:
    """The family's dataset and config classes."""
    load_gym()
    from reasoning_gym.factory import DATASETS

    if family not in DATASETS:
        near = difflib.get_close_matches(family, DATASETS, n=3)
        more = f"did you mean {' or '.join(map(repr, near))}?" if near else f"it has {len(DATASETS)} families"
        raise DataError(f"reasoning-gym has no family {family!r}; {more}")
    return DATASETS[family]
