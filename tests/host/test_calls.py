"""Tool calls as tokens: what is written is read back, in bytes and with GLM's tags, and nothing else is."""

from __future__ import annotations

import json

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from glm_jax.data.file_tokenizer import FileTokenizer
from glm_jax.data.tokenizer import ByteTokenizer
from glm_jax.host.calls import Malformed, check, parse, response, write
from glm_jax.host.errors import RunError

GLM = ["<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "<tool_response>"]
GLM += ["</tool_response>", "<|observation|>", "<|assistant|>", "<|end|>"]


def of_file(folder, tags) -> FileTokenizer:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(tag, special=True) for tag in tags])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 255 + len(tags)}))
    return FileTokenizer(folder)


@pytest.fixture(params=["bytes", "glm"])
def tokenizer(request, tmp_path):
    return ByteTokenizer() if request.param == "bytes" else of_file(tmp_path, GLM)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("submit", {}),
        ("bash", {"command": "printf 'a\\nb' > x\n", "timeout": 2.5}),
        ("write_file", {"path": "naïve 日本", "content": "  \n\t= x=1 "}),
    ],
)
def test_a_call_is_read_as_it_was_written(tokenizer, name, arguments):
    ids = write(name, arguments, tokenizer)
    assert ids[0] == tokenizer.tags["<tool_call>"] and ids[-1] == tokenizer.tags["</tool_call>"]
    call = parse([*tokenizer.encode("Let me think: "), *ids], tokenizer)
    assert (call.name, json.loads(call.arguments)) == (name, arguments)


def test_the_text_of_a_call_is_that_of_glm(tmp_path):
    tokenizer = of_file(tmp_path, GLM)
    text = "<tool_call>read_file<arg_key>path</arg_key><arg_value>a b</arg_value></tool_call>"
    assert tokenizer.decode(write("read_file", {"path": "a b"}, tokenizer)) == text
    spread = (
        text.replace("read_file", "read_file\n")
        .replace("</arg_key>", "</arg_key>\n")
        .replace("</arg_value>", "</arg_value>\n")
    )
    assert json.loads(parse(tokenizer.encode(spread), tokenizer).arguments) == {"path": "a b"}
    seen = tokenizer.decode(response("ok", tokenizer, 9))
    assert seen == "<|observation|><tool_response>ok</tool_response><|assistant|>"


def test_bytes_need_five_tags_and_no_more():
    tokenizer = ByteTokenizer()
    assert len(write("read_file", {"path": "a"}, tokenizer)) == 1 + 9 + 1 + 4 + 1 + 1 + 1
    assert response("ok", tokenizer, 9) == [*tokenizer.encode("ok"), tokenizer.tags["</tool_response>"]]


def test_a_tag_that_is_spelled_in_letters_closes_nothing(tokenizer):
    text = "</tool_call><arg_key>x</arg_key><|end|>"
    call = parse(write("write_file", {"path": "a", "content": text}, tokenizer), tokenizer)
    found = json.loads(call.arguments)
    assert set(found) == {"path", "content"} and found["content"].replace("< ", "<") == text
    seen = response(f"cat: {text}", tokenizer, 999)
    own = set(tokenizer.tags.values())
    frame = [id for id in seen if id in own]
    assert frame == [id for id in response("", tokenizer, 999) if id in own], "a result holds no tag but its frame"


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        (["a", "</tool_call>"], "closes no <tool_call>"),
        (["<tool_call>", "bash", "<arg_key>", "command", "</tool_call>"], "argument 'command' has 0 values"),
        (["<tool_call>", "bash", "<arg_key>", "c", "<arg_value>", "<arg_value>", "</tool_call>"], "has 2 values"),
        (
            ["<tool_call>", "b", *["<arg_key>", "c", "<arg_value>", "x", "</arg_value>"] * 2, "</tool_call>"],
            "'c' is given twice",
        ),
    ],
)
def test_what_is_no_call_is_named(tokenizer, parts, message):
    ids = [id for part in parts for id in ([tokenizer.tags[part]] if part in tokenizer.tags else tokenizer.plain(part))]
    with pytest.raises(Malformed, match=message):
        parse(ids, tokenizer)


WRITE = ["<tool_call>", "write_file", "<arg_key>", "content", "</arg_key>", "<arg_value>"]


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([*WRITE, "a", "</arg_value>", "b", "</arg_value>"], "</arg_value> closes the value of 'content', and 'b"),
        ([*WRITE, "a", "<tool_call>", "b", "</arg_value>"], "<tool_call> stands in the value of 'content'"),
        ([*WRITE, "a", "<arg_value>", "b", "</arg_value>"], "'content' has 2 values"),
        ([*WRITE, "a", "<arg_key>", "b", "</arg_value>"], "the value of 'content' is not closed by </arg_value>"),
        ([*WRITE, "a", "</arg_key>", "b", "</arg_value>"], "</arg_key> stands in the value of 'content'"),
        ([*WRITE, "a"], "the value of 'content' is not closed by </arg_value>"),
        (["<tool_call>", "sub", "<tool_call>", "mit"], "<tool_call> stands in the call's name"),
        (["<tool_call>", "submit", "</arg_value>"], "</arg_value> stands in the call's name"),
    ],
)
def test_a_tag_where_none_belongs_is_named_and_never_a_silent_cut(tmp_path, parts, message):
    tokenizer = of_file(tmp_path, GLM)
    with pytest.raises(Malformed, match=message):
        parse(tokenizer.encode("".join([*parts, "</tool_call>"])), tokenizer)


def test_bytes_know_a_call_within_a_call(tmp_path):
    tokenizer = ByteTokenizer()
    inner = write("submit", {}, tokenizer)
    for outer in (
        [tokenizer.tags["<tool_call>"], *tokenizer.encode("ba")],
        write("bash", {"command": "a"}, tokenizer)[:-1],
    ):
        with pytest.raises(Malformed, match="<tool_call> stands in the"):
            parse([*outer, *inner], tokenizer)


def test_numbers_are_numbers_where_the_tool_wants_them_and_words_stay_words():
    tokenizer = ByteTokenizer()
    arguments = json.loads(parse(write("bash", {"command": "1", "timeout": "soon"}, tokenizer), tokenizer).arguments)
    assert arguments == {"command": "1", "timeout": "soon"}


@pytest.mark.parametrize("most", [40, 41, 60])
def test_a_long_result_keeps_head_and_tail_within_its_bound(most):
    tokenizer = ByteTokenizer()
    text = "".join(chr(97 + i % 26) for i in range(500))
    ids = response(text, tokenizer, most)
    assert len(ids) == most + 1
    shown = tokenizer.decode(ids[:-1])
    head, tail = shown.split("[500 tokens, middle cut]")
    assert head and tail and text.startswith(head) and text.endswith(tail) and abs(len(head) - len(tail)) <= 1
    assert tokenizer.decode(response(text[:most], tokenizer, most)[:-1]) == text[:most], "what fits is whole"
    assert len(response(text, tokenizer, 5)) == 6, "even where the notice has no room"


def test_a_tokenizer_without_the_tags_is_refused_by_name(tmp_path):
    with pytest.raises(RunError, match="no special token <arg_key>, <arg_value>, </tool_response>"):
        check(of_file(tmp_path, GLM[:2]))
    check(ByteTokenizer())
