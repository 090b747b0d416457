"""Agents on tasks: tools and what they answer, how episodes end, the solver's gate, the command."""

from __future__ import annotations

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from glm_jax.cli.main import main
from glm_jax.envs.agents import episode
from glm_jax.envs.agents.cassette import Cassette
from glm_jax.envs.agents.chat import ToolCall, Turn, Usage
from glm_jax.envs.agents.episode import EpisodeLimits
from glm_jax.envs.agents.scripted import Scripted, by_script, calls
from glm_jax.envs.agents.tools import SCHEMAS, Tools
from glm_jax.envs.gates import pipeline
from glm_jax.envs.sandbox.box import Box
from glm_jax.envs.tasks.harbor import read_task
from tests.envs.weak import SOLUTION, write

pytestmark = pytest.mark.envs
SHIPPED = Path(__file__).resolve().parents[2] / "experiments" / "tasks"
SUBMIT = ("submit", {})


@pytest.fixture(scope="module")
def tools():
    with Box() as box:
        yield Tools(box, "/app", {"COLOUR": "red"}, command_limit=30.0, output_bytes=400)


@pytest.fixture
def task(tmp_path):
    return read_task(write(tmp_path / "stats"))


def use(tools: Tools, name: str, **arguments) -> str:
    return tools.call(ToolCall("1", name, json.dumps(arguments))).text


def test_tools_do_what_they_say(tools):
    assert (
        use(tools, "bash", command="echo $COLOUR; pwd; echo oh >&2; exit 3") == "red\n/app\n[stderr]\noh\n[exit code 3]"
    )
    assert use(tools, "write_file", path="a/b.txt", content="één\n") == "6 bytes written to a/b.txt"
    assert use(tools, "read_file", path="/app/a/b.txt") == "één\n"
    assert use(tools, "str_replace", path="a/b.txt", old="één", new="twee") == "a/b.txt edited"
    assert use(tools, "bash", command="cat a/b.txt") == "twee\n[exit code 0]"
    assert "[killed after 0.2 s, with all that it started]" in use(tools, "bash", command="sleep 99", timeout=0.2)
    assert "[... 3293 of 3893 bytes" not in use(tools, "bash", command="seq 1000")
    assert "bytes left out" in use(tools, "bash", command="seq 1000")
    assert "[... 3493 of 3893 bytes left out ...]" in use(tools, "bash", command="seq 1000")
    use(tools, "bash", command="seq 1000 > long")
    assert use(tools, "read_file", path="long").endswith("[... 3493 of 3893 bytes left out ...]\n")
    assert use(tools, "write_file", path="a\udcff", content="") == "0 bytes written to a\\udcff"
    assert use(tools, "b\ud800").startswith("error: there is no tool 'b\\ud800'")
    assert tools.call(ToolCall("1", "submit", "")).submitted


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("bahs", "{}", "there is no tool 'bahs'; there are bash, read_file, write_file, str_replace, submit"),
        ("bash", "{", "the arguments of bash are no JSON"),
        ("bash", "[" * 100_000, "the arguments of bash are no JSON"),
        ("bash", "[1]", "are no object, but [1]"),
        ("bash", "{}", "bash lacks command; it wants command"),
        ("bash", '{"command": 3}', "bash: command is 3; it has to be a string"),
        ("bash", '{"command": "ls", "timeout": true}', "timeout is True; it has to be a number"),
        ("bash", '{"command": "ls", "timeout": 0}', "timeout is 0; it is a number of seconds above 0"),
        ("bash", '{"command": "ls", "limit": 1}', "bash has no argument 'limit'; it wants command"),
        ("read_file", '{"path": "/none"}', "No such file or directory"),
        ("read_file", '{"path": "/app"}', "Is a directory"),
        ("read_file", '{"path": "a\\u0000b"}', "a path holds no zero byte"),
        ("write_file", '{"path": "/usr/x", "content": ""}', "Read-only file system"),
        ("str_replace", '{"path": "/etc/passwd", "old": "nothing of it", "new": ""}', "old stands 0 times"),
        ("str_replace", '{"path": "/etc/passwd", "old": ":", "new": ""}', "it has to stand there exactly once"),
        ("str_replace", '{"path": "/etc/passwd", "old": "\\ud800", "new": ""}', "old stands 0 times"),
        ("bash", '{"command": "ls", "timeout": -1' + "0" * 400 + "}", "it is a number of seconds above 0"),
        ("_place", '{"path": "x"}', "there is no tool '_place'"),
    ],
)
def test_a_malformed_call_is_an_error_observation(tools, name: str, arguments: str, message: str):
    seen = tools.call(ToolCall("1", name, arguments))
    assert seen.error and seen.text.startswith("error: ") and message in seen.text


def test_every_tool_has_a_schema_that_names_its_arguments():
    assert [schema["function"]["name"] for schema in SCHEMAS] == [
        "bash",
        "read_file",
        "write_file",
        "str_replace",
        "submit",
    ]
    assert all(schema["function"]["parameters"]["additionalProperties"] is False for schema in SCHEMAS)


def run(task, said, **limits) -> episode.Episode:
    """An episode of an agent, or of a script of turns."""
    agent = said if hasattr(said, "chat") else Scripted(said)
    return asyncio.run(episode.run(task, agent, EpisodeLimits(**limits)))


def test_an_agent_that_errs_at_first_and_solves_then_is_rewarded(task):
    found = run(
        task,
        [
            calls(("bash", {"command": "cat /app/stats.py /tests/verify.py"})),
            (r"No such file.*\n\[exit code 1\]", Turn(tool_calls=(ToolCall("x", "bash", "{oops"),))),
            ("error: the arguments of bash are no JSON", calls(("bash", {"command": SOLUTION}))),
            (r"\[exit code 0\]", calls(SUBMIT)),
        ],
    )
    assert (found.ending, found.verdict.reward, len(found.turns)) == ("submitted", 1.0, 4)
    assert [message["role"] for message in found.messages] == ["system", "user", *["assistant", "tool"] * 4]
    assert found.messages[5]["tool_call_id"] == "x"


@pytest.mark.parametrize(
    ("turns", "limits", "ending"),
    [
        ([Turn("I am done.")], {}, "answered"),
        ([calls(("bash", {"command": "true"}))] * 3, {"turns": 3}, "turns"),
        (
            [Turn(tool_calls=calls(("bash", {"command": "true"})).tool_calls, usage=Usage(5, 60))] * 3,
            {"tokens": 100},
            "tokens",
        ),
        ([calls(("bash", {"command": "sleep 1000"}))] * 2, {"seconds": 0.5}, "wall_time"),
    ],
)
def test_each_limit_has_an_ending_of_its_own_and_is_graded(task, turns, limits, ending: str):
    found = run(task, turns, **limits)
    assert (found.ending, found.verdict.reward) == (ending, 0.0)


def test_an_agent_that_never_answers_ends_by_wall_time(task):
    class Silent:
        async def chat(self, *_, **__):
            await asyncio.sleep(1000)

    assert run(task, Silent(), seconds=0.2).ending == "wall_time"


def test_many_episodes_run_side_by_side(task):
    async def many():
        return await asyncio.gather(*[episode.run(task, by_script(task.solution)) for _ in range(6)])

    assert [found.verdict.reward for found in asyncio.run(many())] == [1.0] * 6


def test_an_episode_is_recorded_and_played_back(task, tmp_path):
    tape = tmp_path / "tape.jsonl"
    turns = [calls(("bash", {"command": f"id -u; date -Iseconds; mktemp -d; {SOLUTION}"})), calls(SUBMIT)]
    first = run(task, Cassette(tape, "m", "record", Scripted(turns)))
    again = run(task, Cassette(tape, "m"))
    assert first.verdict.reward == again.verdict.reward == 1.0 and first.turns == again.turns
    assert first.messages != again.messages  # another user id, another time


@pytest.mark.parametrize(
    ("solves", "why"),
    [((True, False), ""), ((True, True), "solved in 2 of 2 tries"), ((False, False), "solved in 0 of 2 tries")],
)
def test_a_solver_has_to_solve_a_task_sometimes_and_not_always(task, solves: tuple[bool, ...], why: str):
    left = list(solves)
    make = lambda task: by_script(task.solution if left.pop() else task.partials["mean-only"])
    with ThreadPoolExecutor(1) as pool:
        gate = pipeline.Trials(task, pool, lambda line: None).solver(make, tries=2)
    assert (gate.name, gate.why, len(gate.trials)) == ("solver", why, 2)


def test_the_command_prints_a_transcript_and_the_reward(capsys):
    assert main(["envs", "run", str(SHIPPED / "intervals"), "--agent=oracle"]) == 0
    out = capsys.readouterr().out
    assert "== user\n`/app/intervals.py` has two functions with bugs." in out
    assert '-> bash {"command": "cat > /app/intervals.py' in out and "== submitted after 2 turns: reward 1" in out
    assert main(["envs", "run", str(SHIPPED / "intervals"), "--agent=partial:merge-only"]) == 0
    assert "reward 0\nfailed: gaps(" in capsys.readouterr().out
    assert main(["envs", "run", str(SHIPPED / "intervals"), "--agent=nobody"]) == 2
