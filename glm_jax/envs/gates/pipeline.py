"""The gates, in their order. A task's verifier trains nothing until it has passed them all.

lint, then oracle (rewarded, with three seeds), no-op, incomplete (author's and derived partial solutions, with the
same seeds), attacks and, where an agent is given, solver: it has to solve the task sometimes and not always. Nothing
else may be rewarded, and the verifier has to judge everything: an error is no verdict.
"""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path

from glm_jax.envs.agents import episode
from glm_jax.envs.agents.chat import ChatClient
from glm_jax.envs.gates import answers, attacks
from glm_jax.envs.gates.lint import lint
from glm_jax.envs.gates.partials import derived
from glm_jax.envs.gates.record import Gate, Record, Trial
from glm_jax.envs.gates.replay import replay
from glm_jax.envs.sandbox import probe
from glm_jax.envs.sandbox.box import Collected
from glm_jax.envs.sandbox.files import File, digest
from glm_jax.envs.tasks import family
from glm_jax.envs.tasks.harbor import read_task
from glm_jax.envs.tasks.task import Task
from glm_jax.envs.verify.attempt import scripted
from glm_jax.envs.verify.grade import Verdict, grade

SEEDS = (1, 2, 3)  # of the oracle and of partial solutions; all else gets a new one each time
TRIES = 4  # of a solver
PARTIALS = 2  # that differ from the oracle and from each other, at least
_PATIENCE, _ENDLESS = 10.0, 1.0  # seconds that a candidate gets in an attack, and where it is to never end


def check(
    folder: Path,
    workers: int = 2,
    tell: Callable[[str], None] = lambda line: None,
    solver: Callable[[Task], ChatClient] | None = None,
    tries: int = TRIES,
) -> Record:
    """Runs the gates up to the first that is not passed. `tell` hears of each trial; `solver` makes an agent per try.

    Raises TaskError where the folder is no task that a box can run, SandboxUnavailable where nothing can be run safely.
    """
    task = read_task(folder)
    bundle = task.bundle
    probe.require()
    with ThreadPoolExecutor(workers) as pool:
        trials = [(name, Trials(one, pool, tell)) for name, one in family.gated(task, bundle)]
        found: list[Gate] = []
        gates = [Trials.lint, Trials.oracle, Trials.no_op, Trials.incomplete, Trials.attacks]
        if solver is not None:
            gates.append(partial(Trials.solver, make=solver, tries=tries))
        for gate in gates:
            found.append(_joined([(name, gate(one)) for name, one in trials]))
            tell(f"{task.name}: {found[-1].name} {'passed' if found[-1].passed else 'refused'}")
            if not found[-1].passed:
                break
    if task.bundle != bundle:
        raise RuntimeError(f"{folder} changed while its gates ran: run them again")
    return Record(bundle, tuple(found))


class Trials:
    """The gates of one task; each looks back on what the earlier ones collected."""

    def __init__(self, task: Task, pool: ThreadPoolExecutor, tell: Callable[[str], None]) -> None:
        self.task, self.pool, self.tell = task, pool, tell
        self.start: dict[str, File] = {}
        self.solved: dict[str, File] = {}
        self.record: tuple = ()
        self.judged: dict[tuple[str, int | None], Verdict] = {}  # by artifacts: many attacks leave the start state

    def lint(self) -> Gate:
        return Gate("lint", "; ".join(lint(self.task)))

    def oracle(self) -> Gate:
        def once(seed: int) -> tuple[Collected, Verdict]:
            found, done = scripted(self.task, self.task.solution)
            if not done.ok:
                return found, Verdict(None, f"solve.sh ended with code {done.code}: {str(done.err)[-300:]}")
            return found, grade(self.task, found, seed, record=seed == SEEDS[0])

        results = list(self.pool.map(once, SEEDS))
        self.solved, self.record = results[0][0].files, results[0][1].record
        trials = tuple(_trial(f"seed {seed}", verdict) for seed, (_, verdict) in zip(SEEDS, results, strict=True))
        wrong = [
            f"{trial.name}: {_said(trial)} {verdict.said[-300:]}".strip()
            for trial, (_, verdict) in zip(trials, results, strict=True)
            if trial.reward != 1.0
        ]
        return Gate("oracle", f"the oracle is not rewarded: {'; '.join(wrong)}" if wrong else "", trials)

    def no_op(self) -> Gate:
        found, _ = scripted(self.task, attacks.agent("true"))
        self.start = found.files
        if digest(self.start) == digest(self.solved):
            return Gate("no-op", "the oracle leaves the artifacts as they were")
        touch = f'for a in {shlex.join(self.task.artifacts)}; do mkdir -p "$(dirname "$a")"; touch "$a"; done'
        touched, _ = scripted(self.task, attacks.agent(touch))
        empty = {path: File(b"", file.mode) for path, file in self.solved.items() if path not in self.start}
        cases = {"nothing done": self.start, "files touched": touched.files, "empty files": self.start | empty}
        return self._none_rewarded("no-op", cases, {})

    def incomplete(self) -> Gate:
        found = {name: scripted(self.task, tree)[0].files for name, tree in self.task.partials.items()}
        kinds = {digest(files) for files in found.values()} - {digest(self.solved)}
        if len(kinds) < PARTIALS:
            return Gate("incomplete", f"{len(kinds)} partial solutions differ from the oracle; {PARTIALS} are wanted")
        equivalent = [name for name, files in found.items() if digest(files) == digest(self.solved)]
        cases = {name: files for name, files in found.items() if name not in equivalent}
        skipped = dict.fromkeys(equivalent, "equivalent to the oracle, skipped")
        return self._none_rewarded("incomplete", cases | derived(self.start, self.solved), skipped)

    def attacks(self) -> Gate:
        written = attacks.scripts(self.task) | dict(self.task.attacks)
        found = {name: self.pool.submit(scripted, self.task, tree) for name, tree in written.items()}
        cases = {name: one.result()[0].files for name, one in found.items()}
        spoilt, left_out = answers.spoilt(self.start, self.solved, self.record)
        cases |= spoilt | attacks.forgeries(self.start, self.solved)
        if (again := replay(self.start, self.solved, self.record)) is not None:
            cases["recorded-answers"] = again
        return self._none_rewarded("attacks", cases, left_out)

    def solver(self, make: Callable[[Task], ChatClient], tries: int) -> Gate:
        """Episodes of an agent: a task that it never solves teaches nothing, nor does one that it always solves."""

        def once(number: int) -> Trial:
            found = asyncio.run(episode.run(self.task, make(self.task)))
            trial = _trial(f"try {number + 1}", found.verdict)
            self.tell(f"{self.task.name}:   {trial.name}: {found.ending}, {_said(trial)}")
            return trial

        trials = tuple(self.pool.map(once, range(tries)))
        solved = sum(trial.reward == 1.0 for trial in trials)
        wrong = [f"{trial.name}: {_said(trial)}" for trial in trials if trial.reward is None]
        if not wrong and solved in (0, tries):
            wrong = [f"solved in {solved} of {tries} tries"]
        return Gate("solver", "; ".join(wrong), trials)

    def _none_rewarded(self, name: str, cases: Mapping[str, Mapping[str, File]], left_out: Mapping[str, str]) -> Gate:
        """Grades each, up to the first reward or error: 0 is wanted, or less than 1 for parts of unbinary work.

        Unfinished work is graded with each of the oracle's seeds, since it is right for some hidden inputs. The record
        tells of those that are `left_out` too, with the reason.
        """
        incomplete, attack = name == "incomplete", name == "attacks"
        seeds = SEEDS if incomplete else (None,)
        judge = lambda case, files, seed: self.pool.submit(self._judge, case, files, attack, seed)
        pending = {case: [judge(case, files, seed) for seed in seeds] for case, files in cases.items()}
        trials: list[Trial] = []
        why = ""
        for case, verdicts in pending.items():
            found = [verdict.result() for verdict in verdicts]
            worst = max(found, key=lambda verdict: 2.0 if verdict.reward is None else verdict.reward)
            trials.append(replace(_trial(case, worst), tried=len(seeds)))
            if (
                worst.reward is None
                or worst.reward == 1.0
                or (worst.reward > 0 and (self.task.binary or not incomplete))
            ):
                seed = seeds[found.index(worst)]
                why = f"{case}: {_said(trials[-1])}{f' with seed {seed}' if seed else ''}"
                break
        for verdict in chain(*pending.values()):
            verdict.cancel()
        return Gate(name, why, (*(Trial(case, None, reason) for case, reason in left_out.items()), *trials))

    def _judge(self, name: str, files: Mapping[str, File], attack: bool, seed: int | None) -> Verdict:
        key = digest(files), seed
        if key not in self.judged:
            limit = _ENDLESS if name.endswith("endless") else _PATIENCE if attack else None
            self.judged[key] = grade(self.task, Collected(dict(files), ()), seed, limit=limit)
        self.tell(f"{self.task.name}:   {name}: {_said(_trial(name, self.judged[key]))}")
        return self.judged[key]


def _joined(found: Sequence[tuple[str, Gate]]) -> Gate:
    """One gate of all instances of a family, which is passed if each of them passes it."""
    why = next((f"{name}{gate.why}" for name, gate in found if not gate.passed), "")
    trials = tuple(replace(trial, name=f"{name}{trial.name}") for name, gate in found for trial in gate.trials)
    return Gate(found[0][1].name, why, trials)


def _trial(name: str, verdict: Verdict) -> Trial:
    return Trial(name, verdict.reward, verdict.error[:400])


def _said(trial: Trial) -> str:
    return f"reward {trial.reward:g}" if trial.reward is not None else f"error: {trial.note}"
