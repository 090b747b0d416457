"""Our model as an agent: the tokens it is handed are those of a rollout, and what it sampled is never encoded again."""

from __future__ import annotations

import asyncio
import json

import pytest

from glm_jax.data.tokenizer import ByteTokenizer
from glm_jax.envs.agents.chat import ChatError, Sampling
from glm_jax.envs.agents.tools import Tools
from glm_jax.host import calls
from glm_jax.host.policy import NO_CALL, Policy
from glm_jax.rollout.generate import Completion, generate
from tests.model.tiny import random_params, two_layers

TOKENIZER = ByteTokenizer()
CLOSE, EOS = TOKENIZER.tags[calls.CLOSE], TOKENIZER.eos_id
TASK = [{"role": "system", "content": "Be good."}, {"role": "user", "content": "Read a.\n"}]


@pytest.fixture
def agent(monkeypatch):
    """A policy whose model says what stands in `says`, and which notes the prompts in `heard`."""
    agent = Policy(None, None, TOKENIZER, observation=8, turn=50)
    agent.says, agent.heard = [], []

    def complete(prompt, most, temperature, top_p, stop, seed):
        agent.heard.append((prompt, most, temperature, top_p, stop, seed))
        ids = agent.says.pop(0)
        return Completion(ids, [-0.5] * len(ids))

    monkeypatch.setattr(agent, "_complete", complete)
    return agent


def chat(agent, messages, **sampling):
    return asyncio.run(agent.chat(messages, sampling=Sampling(**sampling)))


def test_the_next_prompt_is_the_last_one_and_what_was_sampled_and_observed(agent):
    # No encoder would write this call so: a space before the name.
    said = [*TOKENIZER.encode("Hm. "), TOKENIZER.tags[calls.OPEN], *TOKENIZER.encode(" bash"), CLOSE]
    agent.says = [said, calls.write("submit", {}, TOKENIZER)]
    turn = chat(agent, TASK, temperature=0.7, top_p=0.9, seed=3)
    prompt = TOKENIZER.encode("Read a.\n")
    assert agent.heard[0] == (prompt, 50, 0.7, 0.9, (CLOSE, EOS), 3)
    assert (turn.text, turn.tool_calls[0].name, turn.finish_reason) == ("Hm. ", "bash", "tool_calls")
    assert turn.prompt_ids == tuple(prompt) and turn.output_ids == tuple(said) and len(turn.logprobs) == len(said)
    seen = {"role": "tool", "tool_call_id": turn.tool_calls[0].id, "content": "word"}
    after = chat(agent, [*TASK, turn.message(), seen])
    assert agent.heard[1][0] == [*prompt, *said, *TOKENIZER.encode("word"), TOKENIZER.tags["</tool_response>"]]
    assert after.tool_calls[0].name == "submit"


def test_a_turn_of_another_agent_is_written_as_training_writes_it(agent):
    agent.says = [[EOS]]
    function = {"name": "read_file", "arguments": json.dumps({"path": "a"})}
    other = {"role": "assistant", "content": "", "tool_calls": [{"id": "x", "function": function}]}
    turn = chat(agent, [*TASK, other, {"role": "tool", "tool_call_id": "x", "content": "0123456789"}])
    written = calls.write("read_file", {"path": "a"}, TOKENIZER)
    assert agent.heard[0][0] == [*TOKENIZER.encode("Read a.\n"), *written, *calls.response("0123456789", TOKENIZER, 8)]
    assert (turn.tool_calls, turn.finish_reason, turn.text) == ((), "stop", "")


def test_a_call_that_is_none_goes_to_the_tools_which_say_so(agent):
    agent.says = [[105, CLOSE], TOKENIZER.encode("on and on")]
    (call,) = chat(agent, TASK).tool_calls
    assert call.name == NO_CALL and "closes no" in call.problem
    assert "closes no" in Tools(None, "/").call(call).text
    assert chat(agent, TASK, max_tokens=9).finish_reason == "length" and agent.heard[1][1] == 9


def test_a_conversation_without_a_task_is_refused(agent):
    with pytest.raises(ChatError, match="no message of a user"):
        chat(agent, TASK[:1])
    with pytest.raises(ChatError, match="a message of 'user' follows the task"):
        chat(agent, [*TASK, TASK[1]])


def test_a_turn_is_what_generate_gives_and_the_next_one_runs_only_what_is_new():
    model = two_layers(vocab_size=TOKENIZER.vocab_size)
    params = random_params(model)
    agent = Policy(params, model, TOKENIZER, observation=8, turn=24)
    first = chat(agent, TASK, temperature=0.9, seed=5)
    stop = (CLOSE, *TOKENIZER.stop_ids)
    (want,) = generate(params, model, [list(first.prompt_ids)], 24, 0.9, 1.0, stop, seed=5)
    assert list(first.output_ids) == want.tokens
    said = {"role": "assistant", "content": first.text}
    talk = [*TASK, first.message() if first.tool_calls else said]
    second = chat(agent, talk, temperature=0.0)
    assert second.prompt_ids[: len(first.prompt_ids)] == first.prompt_ids
    (want,) = generate(params, model, [list(second.prompt_ids)], 24, 0.0, 1.0, stop)
    assert list(second.output_ids) == want.tokens
    again = chat(agent, talk, temperature=0.0)
    assert again.output_ids == second.output_ids
    assert agent._engine.usage["reused"] >= (len(second.prompt_ids) - 1) // 16 * 16
