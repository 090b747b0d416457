"""Sets of tasks with a held-out part that shares no question with training."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from glm_jax.data.errors import DataError
from glm_jax.data.gym import draw
from glm_jax.data.jsonl import read_jsonl

GYM_REWARD = "glm_jax.data.scoring:reasoning_gym_score"


@dataclass(frozen=True)
class Task:
    """One question. `dataclasses.asdict(task)` is what a reward function gets as its `task`."""

    id: str  # unique within a TaskSet
    question: str  # the prompt as the policy sees it: the template filled in
    answer: str | None
    family: str  # a family of reasoning-gym, or "jsonl"
    entry: dict  # the source's own record, whole


@dataclass(frozen=True)
class FamilyConfig:
    """A family of reasoning-gym: its name there, its share of the tasks, its generator's own settings."""

    name: str = "spell_backward"
    weight: float = 1.0
    settings: dict = field(default_factory=dict)
    template: str | None = None  # instead of TaskConfig's, for families whose metadata differ


@dataclass(frozen=True)
class TaskConfig:
    """Where tasks come from.

    With `reasoning_gym` exactly train_size + eval_size distinct questions are drawn. With `jsonl` the sizes are upper
    bounds: `path` is read, and the held-out part is `eval_path`, or eval_size questions of `path` when there is none.
    With `environments` they are task folders whose gates are passed, of which families give as many tasks as wanted.
    """

    source: Literal["reasoning_gym", "jsonl", "environments"] = "reasoning_gym"
    families: tuple[FamilyConfig, ...] = (FamilyConfig(),)
    train_size: int = 4096
    eval_size: int = 512
    seed: int = 0
    path: str | None = None
    eval_path: str | None = None
    environments: tuple[str, ...] = ()  # folders of Harbor tasks, or families of them; rewards are their verifiers'
    reward: str = GYM_REWARD  # module:function of (completion: str, task: dict) -> float, or {"score": float, ...}
    template: str = "{question}\n"  # may name question and metadata[...], the entry's own fields

    def check(self) -> list[str]:
        problems = [
            f"{name} is {value}; it has to be at least 1"
            for name, value in (("train_size", self.train_size), ("eval_size", self.eval_size))
            if value < 1
        ]
        if self.source == "reasoning_gym":
            if not self.families:
                problems.append("families is empty; source = 'reasoning_gym' wants at least one family")
            problems += [
                f"families: weight of {family.name!r} is {family.weight}; it has to be above 0"
                for family in self.families
                if not family.weight > 0
            ]
            if self.path or self.eval_path:
                problems.append("path and eval_path are read with source = 'jsonl' only; set source, or leave them out")
        elif self.source == "environments":
            if not self.environments:
                problems.append("environments is empty; source = 'environments' wants at least one task folder")
        else:
            if self.path is None:
                problems.append("path is not set; source = 'jsonl' wants a file of one JSON object per line")
            if self.reward == GYM_REWARD:
                problems.append(
                    "reward is reasoning-gym's scorer, which cannot score your own data; set it to module:function, "
                    "for example glm_jax.data.scoring:answer_score, which compares with the field 'answer'"
                )
        if ":" not in self.reward:
            problems.append(f"reward is {self.reward!r}; it has to be of the form module:function")
        return problems


@dataclass(frozen=True)
class TaskSet:
    """Tasks to train on and tasks held out. No two of them share a question, nor a prompt."""

    train: tuple[Task, ...]
    eval: tuple[Task, ...]
    repeated: int  # questions that the source gave again and that were left out


def make_tasks(config: TaskConfig) -> TaskSet:
    """The task set of a config: equal configs give equal sets, in an order that depends on nothing but `seed`.

    Two questions are the same when they agree but for case and white space: scorers often do not tell them apart.
    Raises DataError when a family is unknown, has other settings or too few distinct questions, when a file cannot be
    read, or when a user's two files share a question.
    """
    return _from_gym(config) if config.source == "reasoning_gym" else _from_files(config)


def deal(config: TaskConfig, sources: Sequence[Iterable[Task]]) -> TaskSet:
    """A task set of what `sources` give, in equal parts as far as they have that many; a question counts once.

    Raises DataError where nothing would be left to train on.
    """
    seen, found = _Seen(), list[Task]()
    for source, count in zip(sources, _shares(config.train_size + config.eval_size, [1.0] * len(sources)), strict=True):
        found += itertools.islice((task for task in source if seen.new(task.question)), count)
    if len(found) <= config.eval_size:
        raise DataError(
            f"the environments give {len(found)} different questions and eval_size is {config.eval_size}, which leaves "
            "none to train on; lower tasks.eval_size, or name more folders in tasks.environments"
        )
    found = _shuffled(found, config.seed)
    return _task_set(found[config.eval_size :], found[: config.eval_size], seen.repeated)


def same_question(question: str) -> str:
    """The form in which two questions are compared: case folded, white space collapsed."""
    return " ".join(question.casefold().split())


def _from_gym(config: TaskConfig) -> TaskSet:
    seen = _Seen()
    train: list[Task] = []
    held: list[Task] = []
    weights = [family.weight for family in config.families]
    counts = zip(_shares(config.train_size, weights), _shares(config.eval_size, weights), strict=True)
    for number, (family, (train_count, eval_count)) in enumerate(zip(config.families, counts, strict=True)):
        # The generator draws item i from seed + i: families and runs stand far apart so that no streams overlap.
        start = int(_rank(config.seed, f"family {number}")[:7], 16)
        template = family.template or config.template
        entries = draw(family.name, family.settings, start, train_count + eval_count, _keeper(template, seen))
        tasks = [
            Task(f"{family.name}-{number}-{index}", _prompt(template, entry), entry["answer"], family.name, entry)
            for index, entry in entries
        ]
        tasks = _shuffled(tasks, config.seed)
        held += tasks[:eval_count]
        train += tasks[eval_count:]
    return _task_set(_shuffled(train, config.seed), _shuffled(held, config.seed), seen.repeated)


def _from_files(config: TaskConfig) -> TaskSet:
    if config.path is None:
        raise DataError("tasks.path is not set; source = 'jsonl' wants a file of one JSON object per line")
    seen = _Seen()
    tasks = _shuffled(_file_tasks(config, config.path, seen), config.seed)
    if config.eval_path is None:
        if len(tasks) <= config.eval_size:
            raise DataError(
                f"{config.path} has {len(tasks)} distinct questions and eval_size is {config.eval_size}, which leaves "
                "none to train on; lower tasks.eval_size, or name a file of held-out questions in tasks.eval_path"
            )
        held, train = tasks[: config.eval_size], tasks[config.eval_size :]
    else:
        train = tasks
        other = _Seen()
        held = _shuffled(_file_tasks(config, config.eval_path, other), config.seed)
        seen.repeated += other.repeated
    return _task_set(train[: config.train_size], held[: config.eval_size], seen.repeated, all_train=train)


def _file_tasks(config: TaskConfig, path: str, seen: _Seen) -> list[Task]:
    tasks = []
    for record in read_jsonl(path):
        prompt = _prompt(config.template, record.entry)
        if seen.new(record.entry["question"], prompt):
            tasks.append(Task(record.id, prompt, record.entry.get("answer"), "jsonl", record.entry))
    return tasks


def _task_set(
    train: Sequence[Task], held: Sequence[Task], repeated: int, all_train: Sequence[Task] | None = None
) -> TaskSet:
    """The set, after the check that it exists for: nothing held out is trained on."""
    trained = {same_question(task.question) for task in all_train or train}
    trained |= {same_question(task.entry["question"]) for task in all_train or train}
    leaked = [
        task
        for task in held
        if same_question(task.question) in trained or same_question(task.entry["question"]) in trained
    ]
    if leaked:
        raise DataError(
            f"{len(leaked)} held-out questions are training questions too, the first {leaked[0].question!r} "
            f"({leaked[0].id}); take them out of one of the two files"
        )
    ids = [task.id for task in (*train, *held)]
    if len(set(ids)) != len(ids):
        twice = next(i for i in ids if ids.count(i) > 1)
        raise DataError(f"id {twice!r} is used by two tasks; give each line its own 'id', or none")
    return TaskSet(tuple(train), tuple(held), repeated)


class _Seen:
    """Questions and prompts met so far."""

    def __init__(self) -> None:
        self.keys: set[str] = set()
        self.repeated = 0

    def new(self, *texts: str) -> bool:
        """Whether none of these texts was met before; if so they are from now on."""
        keys = {same_question(text) for text in texts}
        if keys & self.keys:
            self.repeated += 1
            return False
        self.keys |= keys
        return True


def _keeper(template: str, seen: _Seen) -> Callable[[dict], bool]:
    return lambda entry: seen.new(entry["question"], _prompt(template, entry))


def _prompt(template: str, entry: dict[str, Any]) -> str:
    """The template filled with the entry's question and metadata."""
    metadata = entry.get("metadata", entry)
    try:
        return template.format(question=entry["question"], metadata=metadata)
    except (KeyError, IndexError, AttributeError, ValueError) as error:
        raise DataError(
            f"template {template!r} cannot be filled in ({type(error).__name__}: {error}); it may name "
            f"question and metadata[...] of {', '.join(map(str, metadata))}"
        ) from error


def _shares(total: int, weights: Sequence[float]) -> list[int]:
    """`total` split in proportion to `weights`, by largest remainder."""
    exact = [total * weight / sum(weights) for weight in weights]
    counts = [int(share) for share in exact]
    by_remainder = sorted(range(len(exact)), key=lambda i: counts[i] - exact[i])
    for i in by_remainder[: total - sum(counts)]:
        counts[i] += 1
    return counts


def _rank(seed: int, text: str) -> str:
    return hashlib.sha256(f"{seed}\n{text}".encode("utf-8", errors="replace")).hexdigest()


def _shuffled(tasks: Iterable[Task], seed: int) -> list[Task]:
    """In an order that hangs on seed and questions alone, so that both parts of a split are alike."""
    return sorted(tasks, key=lambda task: _rank(seed, task.question))
