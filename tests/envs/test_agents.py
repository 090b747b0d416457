"""Agents without a model: scripts and cassettes."""

from __future__ import annotations

import asyncio
import json

import pytest

from glm_jax.envs.agents.cassette import Cassette
from glm_jax.envs.agents.chat import ChatError, Sampling, Turn, Usage
from glm_jax.envs.agents.scripted import Scripted, by_script, calls
from glm_jax.envs.sandbox.files import File

ASK = [{"role": "user", "content": "what is 6 * 7?"}]


def ask(agent, messages=ASK, **more) -> Turn:
    return asyncio.run(agent.chat(messages, **more))


# ------------------------------------------------------------------------------------------------ scripts


def test_a_script_says_its_turns_and_checks_what_it_hears():
    agent = Scripted([Turn("one"), (r"6 \* 7", Turn("two")), ("never", Turn("three"))])
    assert ask(agent).text == "one" and ask(agent).text == "two"
    with pytest.raises(ChatError, match="turn 3 of the script expects 'never', and the last message is 'what is 6"):
        ask(agent)
    with pytest.raises(ChatError, match="the script has 3 turns"):
        ask(agent)


def test_a_solution_is_played_through_the_tools():
    agent = by_script({"solve.sh": File(b"echo 1 > x\n")})
    (call,) = ask(agent).tool_calls
    assert (call.name, json.loads(call.arguments)) == ("bash", {"command": "echo 1 > x\n"})
    assert ask(agent).tool_calls[0].name == "submit"
    made = ask(by_script({"solve.sh": File(b"s"), "oracle.sh": File(b"o")})).tool_calls
    assert [call.name for call in made] == ["write_file", "write_file", "bash"]
    assert json.loads(made[1].arguments) == {"path": "/tmp/script/oracle.sh", "content": "o"}
    assert json.loads(made[2].arguments) == {"command": "bash /tmp/script/solve.sh"}


# ------------------------------------------------------------------------------------------------ cassettes


def test_what_was_recorded_is_played_back_in_its_order(tmp_path):
    tape = tmp_path / "tape.jsonl"
    said = [Turn("a", usage=Usage(1, 2)), calls(("bash", {"command": "ls"})), Turn("c", output_ids=(1, 2))]
    recording = Cassette(tape, "m", "record", Scripted(said))
    other = [{"role": "user", "content": "another"}]
    assert [ask(recording), ask(recording), ask(recording, other)] == said
    playing = Cassette(tape, "m")
    assert [ask(playing, other), ask(playing), ask(playing)] == [said[2], said[0], said[1]]
    with pytest.raises(ChatError, match="has no answer number 3 to this question"):
        ask(playing)


def test_what_differs_from_run_to_run_does_not_matter_and_all_else_does(tmp_path):
    tape = tmp_path / "tape.jsonl"
    text = "uid={} ran in {}\n{}\nfor {}"
    first = [{"role": "user", "content": text.format(60123, "/tmp/abc", "2026-01-02T03:04:05Z", "call-1")}]
    again = [{"role": "user", "content": text.format(64001, "/tmp/xyz_1", "2027-11-12 13:14", "call_zz")}]
    ask(Cassette(tape, "m", "record", Scripted([Turn("a")])), first)
    assert ask(Cassette(tape, "m"), again).text == "a"
    for change in ({"messages": ASK}, {"sampling": Sampling(seed=4)}, {"tools": [{"x": 1}]}):
        with pytest.raises(ChatError, match="the nearest differs:\n--- on tape"):
            ask(Cassette(tape, "m"), **{"messages": again, **change})
    with pytest.raises(ChatError, match='"model": "other"'):
        ask(Cassette(tape, "other"), again)


def test_what_is_missing_can_be_recorded_and_nothing_else_is_asked(tmp_path):
    tape = tmp_path / "tape.jsonl"
    ask(Cassette(tape, "m", "record", Scripted([Turn("a")])))
    mixed = Cassette(tape, "m", "record-missing", Scripted([Turn("b")]))
    assert ask(mixed).text == "a" and ask(mixed, [{"role": "user", "content": "new"}]).text == "b"
    assert len(tape.read_text().splitlines()) == 2
    with pytest.raises(ChatError, match="there is no cassette"):
        Cassette(tmp_path / "none", "m")
    with pytest.raises(ValueError, match="mode 'record' wants client"):
        Cassette(tape, "m", "record")
