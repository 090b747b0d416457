"""An attempt at a task: an agent's box in its start state, and what is taken out of it when the agent has ended."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePosixPath

from glm_jax.envs.sandbox.box import Box, Collected
from glm_jax.envs.sandbox.files import File, placed
from glm_jax.envs.sandbox.limits import Result
from glm_jax.envs.tasks.task import NeedsContainer, Task, TaskError

SCRIPTS = "/solution"  # where a scripted agent's files are; no other agent's box has the folder
_OWN = ("/usr", "/bin", "/sbin", "/lib", "/lib64", "/etc", "/proc", "/dev", "/opt", "/tests", SCRIPTS, "/logs")


def agent_box(task: Task, script: Mapping[str, File] | None = None) -> Box:
    """A box in the task's start state. With `script` (its solve.sh is not run yet), those files as well."""
    extra = (*((SCRIPTS,) if script is not None else ()), *(() if task.separate else ("/tests",)))
    box = Box(task.limits, folders=(*folders(task), "/logs", *extra))
    try:
        box.put(task.start)
        for step in task.steps:
            done = box.run(step.command, task.agent_timeout, env=step.env, cwd=step.cwd)
            if not done.ok:
                raise TaskError(f"{task.folder}: RUN {step.command} failed with code {done.code}: {done.err}")
        box.run(["/bin/mkdir", "-p", "/logs/agent", "/logs/artifacts"], task.agent_timeout)
        if script is not None:
            box.put(placed(script, SCRIPTS))
    except BaseException:
        box.close()
        raise
    return box


def folders(task: Task) -> tuple[str, ...]:
    """The writable folders of an attempt: the work folder first, then where else the task has files or artifacts."""
    paths = [path for path in (*task.start, *task.artifacts) if not PurePosixPath(path).is_relative_to(task.workdir)]
    others = {f"/{PurePosixPath(path).parts[1]}" for path in paths} - {"/tmp"}
    others -= {"/logs"} if not any(path.startswith("/logs/") for path in task.start) else set()
    if taken := sorted(others & set(_OWN)):
        raise NeedsContainer(
            task.folder / "environment" / "Dockerfile", None, f"files in {taken[0]}, which is read-only"
        )
    return (task.workdir, *sorted(other for other in others if not task.workdir.startswith(other + "/")))


def finish(task: Task, box: Box) -> Collected:
    """Ends the agent, runs the task's own collecting commands, and copies the artifacts out."""
    box.stop()
    for command in task.collect:
        box.run(command, task.verifier_timeout, env=task.env, cwd=task.workdir)
    return box.collect(task.artifacts)


def scripted(task: Task, script: Mapping[str, File]) -> tuple[Collected, Result]:
    """What a scripted agent leaves: solve.sh of `script` run to its end in the work folder."""
    with agent_box(task, script) as box:
        done = box.run(["/bin/bash", f"{SCRIPTS}/solve.sh"], task.agent_timeout, env=task.env, cwd=task.workdir)
        return finish(task, box), done
