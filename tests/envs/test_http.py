"""Agents behind a server: the form of requests and answers, what is tried again, what is told."""

from __future__ import annotations

import asyncio
import http.server
import json
import threading

import httpx
import pytest

from glm_jax.envs.agents.chat import ChatError, Sampling, ToolCall, Turn, Usage
from glm_jax.envs.agents.http import KEY_VARIABLE, HttpChat

ASK = [{"role": "user", "content": "what is 6 * 7?"}]


def ask(agent: HttpChat, **more) -> Turn:
    return asyncio.run(agent.chat(ASK, **more))


def answer(text: str = "42", **message) -> dict:
    """A server's answer."""
    message = {"role": "assistant", "content": text, **message}
    usage = {"prompt_tokens": 9, "completion_tokens": 2}
    return {"choices": [{"message": message, "finish_reason": "stop"}], "usage": usage}


def server(*answers):
    """A transport that answers in order, and the requests that it got."""
    requests, left = [], list(answers)

    def handle(request):
        requests.append(request)
        found = left.pop(0)
        if isinstance(found, Exception):
            raise found
        status, body, headers = found
        return httpx.Response(status, json=body, headers=headers)

    return httpx.MockTransport(handle), requests


def test_a_request_and_its_answer_have_the_chat_form(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "the-key")
    wanted = [{"id": "call-1", "type": "function", "function": {"name": "bash", "arguments": '{"command": "ls"}'}}]
    transport, requests = server((200, answer("", tool_calls=wanted, reasoning_content="hm"), {}))
    agent = HttpChat("http://x/v1/", "m", transport=transport)
    tools = [{"type": "function", "function": {"name": "bash"}}]
    turn = ask(agent, tools=tools, sampling=Sampling(0.5, 0.9, 77, seed=3, stop=("END",)))
    assert turn == Turn("", (ToolCall("call-1", "bash", '{"command": "ls"}'),), "hm", "stop", Usage(9, 2))
    (request,) = requests
    assert str(request.url) == "http://x/v1/chat/completions" and request.headers["authorization"] == "Bearer the-key"
    assert json.loads(request.content) == {
        "model": "m",
        "messages": ASK,
        "tools": tools,
        "temperature": 0.5,
        "top_p": 0.9,
        "max_tokens": 77,
        "seed": 3,
        "stop": ["END"],
    }
    assert turn.message()["tool_calls"] == wanted


def test_what_passes_is_tried_again_and_what_does_not_is_told(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "the-key")
    busy, lost = (429, {"error": "busy"}, {"retry-after": "0"}), httpx.ConnectError("gone")
    transport, requests = server(busy, lost, (503, {}, {}), (200, answer(), {}))
    assert ask(HttpChat("http://x", "m", transport=transport, first_pause=0.001)).text == "42" and len(requests) == 4
    transport, requests = server(*[busy] * 3)
    with pytest.raises(ChatError, match="gave no answer in 3 tries: status 429") as caught:
        ask(HttpChat("http://x", "m", transport=transport, retries=2, first_pause=0.001))
    assert "the-key" not in str(caught.value)
    transport, requests = server((401, {"error": "who?"}, {}))
    monkeypatch.delenv("OPENAI_API_KEY")
    with pytest.raises(ChatError, match=r"refused \(no key: OPENAI_API_KEY is not set\): status 401"):
        ask(HttpChat("http://x", "m", transport=transport))
    assert len(requests) == 1


@pytest.mark.parametrize("body", [{}, {"choices": []}, {"choices": [{"message": None}]}, [1], answer(7)])
def test_an_answer_of_another_form_is_told(body):
    transport, _ = server((200, body, {}))
    with pytest.raises(ChatError, match="is not of the chat form"):
        ask(HttpChat("http://x", "m", transport=transport))


def call(name: object = "bash", arguments: object = '{"command": "ls"}', **more) -> dict:
    return {"function": {"name": name, "arguments": arguments}, **more}


@pytest.mark.parametrize(
    ("calls", "wanted"),
    [
        ([call(arguments={"command": "ls"}, id="a")], [ToolCall("a", "bash", '{"command": "ls"}')]),
        ([call(), call(id=None)], [ToolCall(f"call-1-{i}", "bash", '{"command": "ls"}') for i in range(2)]),
        ([call(id="same", arguments="")] * 2, [ToolCall(f"call-1-{i}", "bash", "") for i in range(2)]),
        ([call(None, None, id="a"), {"id": "b", "function": {}}], [ToolCall("a", "", "{}"), ToolCall("b", "", "{}")]),
        ([{"id": "a", "name": "bash", "arguments": "{}"}], [ToolCall("a", "bash", "{}")]),
    ],
)
def test_calls_that_are_nearly_of_openais_form_are_read_as_meant(calls, wanted):
    transport, _ = server((200, answer("", tool_calls=calls), {}))
    assert list(ask(HttpChat("http://x", "m", transport=transport)).tool_calls) == wanted


@pytest.mark.parametrize("content", ["42", [{"type": "text", "text": "4"}, {"type": "image_url"}, "2"]])
@pytest.mark.parametrize("thought", [{"reasoning_content": "hm"}, {"reasoning": [{"type": "text", "text": "hm"}]}])
def test_parts_are_joined_and_reasoning_goes_back_into_the_history(content, thought):
    transport, _ = server((200, answer(content, **thought), {}))
    said = ask(HttpChat("http://x", "m", transport=transport)).message()
    assert said == {"role": "assistant", "content": "42", "reasoning_content": "hm"}


def test_no_more_requests_are_out_than_allowed():
    out = most = 0

    async def handle(request):
        nonlocal out, most
        out += 1
        most = max(most, out)
        await asyncio.sleep(0.01)
        out -= 1
        return httpx.Response(200, json=answer())

    async def many():
        async with HttpChat("http://x", "m", transport=httpx.MockTransport(handle), concurrency=3) as agent:
            return await asyncio.gather(*[agent.chat(ASK) for _ in range(12)])

    assert len(asyncio.run(many())) == 12 and most == 3


def test_a_real_server_is_spoken_to_over_a_socket(monkeypatch):
    """One request through a socket, to a server of the standard library."""
    got = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            got.append((self.path, json.loads(self.rfile.read(int(self.headers["content-length"])))))
            body = json.dumps(answer("hello")).encode()
            self.send_response(200)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as listener:
        thread = threading.Thread(target=listener.handle_request)
        thread.start()
        turn = ask(HttpChat(f"http://127.0.0.1:{listener.server_port}/v1", "m", retries=0))
        thread.join()
    assert turn.text == "hello" and got[0][0] == "/v1/chat/completions"
