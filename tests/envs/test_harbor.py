"""Task folders: what is read natively, and what is refused with the file, the line and the reason."""

from __future__ import annotations

import codecs
import os
import shutil
from pathlib import Path

import pytest

from glm_jax.envs.sandbox.files import File
from glm_jax.envs.tasks.harbor import read_task
from glm_jax.envs.tasks.task import NeedsContainer, TaskError, bundle_hash

SHIPPED = Path(__file__).resolve().parents[2] / "experiments" / "tasks"
TOML = """
schema_version = "1.4"
artifacts = ["/job/out.txt", {source = "logs", destination = "x"}]
[task]
name = "org/sample"
[metadata]
difficulty = "easy"
[agent]
timeout_sec = 12
[verifier]
timeout_sec = 34.5
environment_mode = "separate"
[verifier.env]
MODE = "strict"
[[verifier.collect]]
command = "cp a b"
[environment]
memory = "2G"
storage_mb = 64
[environment.env]
COLOUR = "red"
"""
DOCKERFILE = """\
# a comment
FROM python:3.11-slim
ENV A=1 B="two words"
WORKDIR /job
COPY data/ /job/data/
COPY one.txt two.txt ./
COPY one.txt /srv/$A.txt
RUN mkdir -p out && \\
    echo ready > out/state
RUN pip install --no-cache-dir numpy
USER nobody
"""


def write(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


@pytest.fixture
def sample(tmp_path) -> Path:
    files = {"task.toml": TOML, "instruction.md": "Do it.\n", "tests/test.sh": "true\n", "solution/solve.sh": "true\n"}
    data = {"data/deep/x": "x", "one.txt": "1", "two.txt": "2", "Dockerfile": DOCKERFILE}
    return write(tmp_path / "sample", files | {f"environment/{name}": text for name, text in data.items()})


def test_a_harbor_task_is_read_natively(sample):
    task = read_task(sample)
    assert (task.name, task.instruction, task.workdir) == ("org/sample", "Do it.\n", "/job")
    assert task.separate and task.binary and task.warnings == ()
    assert (task.agent_timeout, task.verifier_timeout) == (12.0, 34.5)
    assert task.artifacts == ("/job/out.txt", "/job/logs") and task.collect == ("cp a b",)
    assert task.env == {"A": "1", "B": "two words", "COLOUR": "red"} and task.verifier_env == {"MODE": "strict"}
    assert (task.limits.memory_mb, task.limits.disk_mb) == (2048, 64)
    assert task.start == {
        "/job/data/deep/x": File(b"x"),
        "/job/one.txt": File(b"1"),
        "/job/two.txt": File(b"2"),
        "/srv/1.txt": File(b"1"),
    }
    (step,) = task.steps
    assert (step.command, step.cwd) == ("mkdir -p out && echo ready > out/state", "/job")


def test_the_oldest_form_is_read_too(sample):
    old = 'version = "1.0"\n[metadata]\n[environment]\nmemory = "512M"\n'
    (sample / "task.toml").write_text(old)
    task = read_task(sample)
    assert task.name == "sample" and task.limits.memory_mb == 512
    assert not task.separate and task.artifacts == ("/job",)  # Harbor's defaults
    assert task.warnings == ("its verifier shares the agent's box: a reward of it trains nothing",)


def test_what_has_no_effect_is_a_warning(sample):
    more = "allow_internet = true\nturbo = 1\n[environment.env]"
    (sample / "task.toml").write_text(TOML.replace("[environment.env]", more))
    assert read_task(sample).warnings == (
        "it asks for the network, and runs without",
        "environment.turbo is not known and has no effect",
    )


@pytest.mark.parametrize(
    ("line", "number", "what"),
    [
        ("FROM pytorch/pytorch:2", 2, "FROM pytorch/pytorch:2"),
        ("FROM python:3.11-slim AS build", 2, "FROM python:3.11-slim AS build"),
        ("RUN apt-get install -y gcc", 8, "RUN apt-get install -y gcc"),
        ("RUN pip install no-such-package-here", 8, "which this Python has not"),
        ("RUN pip install numpy==0.1", 8, "this Python has"),
        ("RUN echo $(cat /etc/passwd)", 8, "RUN echo"),
        ("RUN mkdir x && curl evil", 8, "RUN curl evil"),
        ("ADD https://x/y /z", 8, "ADD is nothing that a box can do"),
        ("COPY --from=build a b", 8, "options other than"),
        ("VOLUME /x", 8, "VOLUME"),
    ],
)
def test_what_a_box_cannot_do_is_named_with_its_line(sample, line: str, number: int, what: str):
    lines = DOCKERFILE.splitlines()
    if line.startswith("FROM"):
        lines[1] = line
    else:
        lines.insert(7, line)
    (sample / "environment" / "Dockerfile").write_text("\n".join(lines))
    with pytest.raises(NeedsContainer) as caught:
        read_task(sample)
    assert f"environment/Dockerfile:{number}: needs a container:" in str(caught.value) and what in str(caught.value)


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ('docker_image = "x/y"', "task.toml:{line}: needs a container: docker_image = 'x/y'"),
        ("gpus = 1", "task.toml:{line}: needs a container: GPUs"),
        ('os = "windows"', "task.toml:{line}: needs a container: another system than Linux"),
    ],
)
def test_an_environment_beyond_a_box_is_named_with_its_line(sample, key: str, message: str):
    text = TOML.replace("[environment.env]", f"{key}\n[environment.env]")
    (sample / "task.toml").write_text(text)
    line = text.splitlines().index(key) + 1
    with pytest.raises(NeedsContainer) as caught:
        read_task(sample)
    assert message.format(line=line) in str(caught.value)


@pytest.mark.parametrize("line", ["apt-get update", "  curl -LsSf https://x | sh", "uvx pytest", "pip install pytest"])
def test_tests_that_fetch_their_runner_need_a_container(sample, line: str):
    (sample / "tests" / "test.sh").write_text(f"#!/bin/bash\n# apt-get in a comment\n{line}\n")
    with pytest.raises(NeedsContainer, match=r"tests/test.sh:3: needs a container: .* fetches from the network"):
        read_task(sample)


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ('schema_version = "1.4"', 'schema_version = "9"', "schema_version is '9'; this reads 1.0 to 1.4"),
        ("timeout_sec = 12", "timeout_sec = -1", "agent.timeout_sec is -1.0; it is a number of seconds above 0"),
        ("timeout_sec = 12", 'timeout_sec = "12"', "agent.timeout_sec is '12'; it has to be a number"),
        ('"separate"', '"both"', "environment_mode is 'both'; it is 'separate' or 'shared'"),
        ('memory = "2G"', 'memory = "much"', "environment.memory is 'much'; it looks like '4G'"),
        ('"/job/out.txt"', '"../out.txt"', "artifacts holds '../out.txt'"),
        ('"/job/out.txt"', '"/logs/verifier/reward.txt"', "which is no agent's to write"),
        ('"/job/out.txt"', '"/tests"', "which is no agent's to write"),
        ('MODE = "strict"', 'MODE = "${API_KEY}"', "verifier.env.MODE is ${API_KEY}; boxes get no variable"),
        ('command = "cp a b"', "command = 3", "verifier.collect holds"),
        ("[environment.env]", 'workdir = "/usr/x"\n[environment.env]', "'/usr/x', which a box needs itself"),
        ("[environment.env]", 'workdir = "/"\n[environment.env]', "has to be an absolute folder below /"),
        ("[agent]", "[agent", "task.toml"),
        ("[agent]", "deep = " + "[" * 100_000, "task.toml: nested too deeply"),
        ('memory = "2G"', "memory_mb = -1", "environment.memory is -1 MiB; it is 1 to 1048576"),
        ('memory = "2G"', "memory_mb = 9999999999", "environment.memory is 9999999999 MiB; it is 1 to 1048576"),
        ('memory = "2G"', f'memory = "{"9" * 400}G"', "environment.memory is inf MiB; it is 1 to 1048576"),
        ("storage_mb = 64", "storage_mb = 0", "environment.storage is 0 MiB; it is 1 to 1048576"),
        ("[environment.env]", 'workdir = "/a\\u0000b"\n[environment.env]', "has to be an absolute folder below /"),
        ('"/job/out.txt"', '"/job/\\u0000"', "artifacts holds '/job/\\x00'"),
    ],
)
def test_a_malformed_task_is_one_clear_error(sample, before: str, after: str, message: str):
    assert before in TOML
    (sample / "task.toml").write_text(TOML.replace(before, after))
    with pytest.raises(TaskError) as caught:
        read_task(sample)
    assert message in str(caught.value) and not isinstance(caught.value, NeedsContainer)


@pytest.mark.parametrize("name", ["task.toml", "instruction.md", "tests/test.sh", "environment/Dockerfile"])
def test_a_missing_part_is_named(sample, name: str):
    (sample / name).unlink()
    with pytest.raises(TaskError, match=Path(name).name):
        read_task(sample)


def test_byte_order_marks_and_other_line_ends_change_nothing(sample):
    want = read_task(sample)
    for name in ("task.toml", "instruction.md", "environment/Dockerfile"):
        path = sample / name
        path.write_bytes(codecs.BOM_UTF8 + path.read_bytes().replace(b"\n", b"\r\n"))
    assert read_task(sample) == want
    (sample / "task.toml").write_text("[task]", encoding="utf-16")
    with pytest.raises(TaskError, match="task.toml is UTF-16 by its first bytes"):
        read_task(sample)


@pytest.mark.parametrize("name", ["task.toml", "instruction.md", "environment/Dockerfile"])
def test_a_part_that_is_no_text_or_endless_is_named(sample, name: str):
    whole = (sample / name).read_bytes()
    for content in (whole + b"\xff", whole + b"\n# more" * 200_000):
        (sample / name).write_bytes(content)
        with pytest.raises(TaskError, match=Path(name).name):
            read_task(sample)
    (sample / name).unlink()
    os.mkfifo(sample / name)
    with pytest.raises(TaskError, match=Path(name).name):
        read_task(sample)


@pytest.mark.parametrize("line", ["ENV", "COPY 'a", "WORKDIR"])
def test_a_malformed_line_of_a_dockerfile_is_named(sample, line: str):
    (sample / "environment" / "Dockerfile").write_text(f"FROM debian\n{line}\n")
    with pytest.raises(TaskError, match="Dockerfile:2"):
        read_task(sample)


def test_a_link_in_a_task_is_refused(sample):
    (sample / "solution" / "secret").symlink_to("/etc/passwd")
    with pytest.raises(TaskError, match="solution/secret is neither file nor folder"):
        read_task(sample)


def test_the_bundle_is_of_every_file_but_the_record_of_gates(sample):
    before = bundle_hash(sample)
    (sample / "gates.json").write_text("{}")
    assert bundle_hash(sample) == before == read_task(sample).bundle
    seen = {before}
    for change in (
        lambda: (sample / "instruction.md").write_text("Do it!\n"),
        lambda: (sample / "tests" / "more.py").write_text(""),
        lambda: (sample / "tests" / "more.py").rename(sample / "tests" / "less.py"),
        lambda: (sample / "tests" / "less.py").chmod(0o755),
        lambda: shutil.rmtree(sample / "environment" / "data"),
    ):
        change()
        seen.add(bundle_hash(sample))
    assert len(seen) == 6


def test_every_shipped_task_is_read_without_a_warning():
    tasks = [read_task(path) for path in sorted(SHIPPED.iterdir())]
    assert len(tasks) == 10
    for task in tasks:
        assert task.separate and not task.warnings and len(task.partials) >= 2 and "solve.sh" in task.solution
    kinds = {task.metadata["category"] for task in tasks}
    assert {"file-editing", "data-wrangling", "debugging", "shell", "log-analysis", "ml-infrastructure"} <= kinds
    patterns = {tag for task in tasks for tag in task.metadata["tags"]}
    assert {"plan", "service", "graph"} <= patterns
