"""Questions from reasoning-gym's generators. It takes seconds to import, so functions import it when called."""

from __future__ import annotations

import difflib
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import fields, replace
from functools import cache, partial
from typing import Any

from glm_jax.data.errors import DataError

# A family counts as exhausted after this many draws in a row that gave nothing new.
PATIENCE = 2000
TELL_AFTER = 10.0  # seconds of a draw after which, and after each more of which, it is told what is waited for
COMPOSITE = "composite"  # the family whose settings name other families

logger = logging.getLogger(__name__)


def draw(
    family: str, settings: dict[str, Any], start: int, count: int, keep: Callable[[dict], bool]
) -> list[tuple[int, dict]]:
    """`count` entries that `keep` accepts, as (index, entry), from the family's generator seeded with `start`.

    Raises DataError for an unknown family or setting, and when too few entries are accepted.
    """
    found: list[tuple[int, dict]] = []
    with _telling(family, found, count):
        source = _Source(family, settings, start, count)
        index = last_new = 0
        while len(found) < count:
            entry = source.entry(index)
            if entry is not None and keep(entry):
                found.append((index, entry))
                last_new = index
            index += 1
            if entry is None or index - last_new > PATIENCE:
                raise DataError(
                    f"family {family!r} gave {len(found)} distinct questions in {index} draws and {count} are wanted; "
                    "lower tasks.train_size or tasks.eval_size, or widen the family's settings "
                    f"(now {settings or 'none'})"
                )
    return found


class _Source:
    """A family's entries by index. Some generators make at once all that they are asked for, so it asks as it goes."""

    def __init__(self, family: str, settings: dict[str, Any], start: int, count: int):
        self._make = partial(_dataset, family, settings, start)
        self._size, self._dataset = count, self._make(count)

    def entry(self, index: int) -> dict | None:
        """None where the family has no so many."""
        while True:
            if index < self._size:
                with suppress(IndexError):
                    return self._dataset[index]
                if self._size > 2 * (index + 1):  # it gives less than it was asked for, however much that is
                    return None
            size = 2 * self._size + 2
            try:
                self._dataset = self._make(size)
            except DataError:  # more than it gives
                return None
            self._size = size


@contextmanager
def _telling(family: str, found: list, count: int) -> Iterator[None]:
    """Says every so often that a draw is still going on: some generators take minutes."""
    done = threading.Event()

    def tell() -> None:
        while not done.wait(TELL_AFTER):
            logger.warning("still drawing questions of reasoning-gym's family %r: %d of %d", family, len(found), count)

    thread = threading.Thread(target=tell, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


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


def _dataset(family: str, settings: dict[str, Any], start: int, size: int) -> Any:
    _, config_class = _known(family)
    import reasoning_gym

    known = {entry.name for entry in fields(config_class)} - {"seed", "size"}
    for name in settings:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            more = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(sorted(known))}"
            raise DataError(f"family {family!r} has no setting {name!r}; {more}")
    try:
        return reasoning_gym.create_dataset(family, **_own(family, settings), seed=start, size=size)
    except (AssertionError, TypeError, ValueError, AttributeError) as error:
        raise DataError(f"family {family!r} refuses its settings {settings}: {error}") from error


def _own(family: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Settings as the family's config takes them: of `composite`, datasets = ({name, weight, config}, ...)."""
    if family != COMPOSITE or "datasets" not in settings:
        return settings
    from reasoning_gym.composite import DatasetSpec

    specs = [DatasetSpec(**{"weight": 1.0, "config": {}, **spec}) for spec in settings["datasets"]]
    return {**settings, "datasets": [replace(spec, config=dict(spec.config)) for spec in specs]}


def _known(family: str) -> tuple[type, type]:
    """The family's dataset and config classes."""
    load_gym()
    from reasoning_gym.factory import DATASETS

    if family not in DATASETS:
        near = difflib.get_close_matches(family, DATASETS, n=3)
        more = f"did you mean {' or '.join(map(repr, near))}?" if near else f"it has {len(DATASETS)} families"
        raise DataError(f"reasoning-gym has no family {family!r}; {more}")
    return DATASETS[family]
