"""A model folder's own tokenizer: round trips, stop ids, and the chat template in its sandbox."""

from __future__ import annotations

import codecs
import json
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from glm_jax.data.file_tokenizer import FileTokenizer, TokenizerError, carry_over
from glm_jax.data.tokenizer import ByteTokenizer, tokenizer_of

TEMPLATE = (
    "[gMASK]{% for m in messages %}\n  {% if m.role == 'user' %}<|user|>{{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def write(folder: Path, eos: object = 258, **config: object) -> Path:
    """A byte-level BPE without merges: 256 bytes, then special tokens from 256 on."""
    folder.mkdir(exist_ok=True)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in ("<|user|>", "<|assistant|>", "<|end|>")])
    tokenizer.save(str(folder / "tokenizer.json"))
    if eos is not None:
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def test_texts_come_back_and_special_tokens_are_one_id(tmp_path):
    tokenizer = FileTokenizer(write(tmp_path))
    for text in ("", "plain", "Grüße, 世界\n\t!", "<|user|>hi<|assistant|>"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode("<|user|>")[0] == 256 and tokenizer.vocab_size == 259
    assert tokenizer.decode([*tokenizer.encode("so"), 258]) == "so", "the stop id at the end is dropped"
    assert tokenizer.decode([258, *tokenizer.encode("so")]) == "<|end|>so"
    assert tokenizer.fits(259) and tokenizer.fits(320) and not tokenizer.fits(258)


def test_stop_ids_come_from_the_first_file_that_names_them(tmp_path):
    assert FileTokenizer(write(tmp_path, eos=[258, 256])).stop_ids == (258, 256)
    (tmp_path / "generation_config.json").unlink()
    (tmp_path / "config.json").write_text('{"eos_token_id": 257}')
    assert FileTokenizer(tmp_path).stop_ids == (257,)
    (tmp_path / "config.json").unlink()
    for name in ("<|end|>", {"content": "<|end|>"}):
        tokenizer = FileTokenizer(write(tmp_path, eos=None, eos_token=name))
        assert tokenizer.stop_ids == (258,) and tokenizer.eos_id == 258
    with pytest.raises(TokenizerError, match="which token ends an answer"):
        FileTokenizer(write(tmp_path, eos=None))


def test_the_chat_template_writes_messages_up_to_the_answer(tmp_path):
    messages = [{"role": "user", "content": "2+2?"}]
    for config in ({"chat_template": TEMPLATE}, {"chat_template": [{"name": "default", "template": TEMPLATE}]}):
        assert FileTokenizer(write(tmp_path, **config)).chat(messages) == "[gMASK]<|user|>2+2?<|assistant|>"
    loop = "{% for m in messages %}{{ m | tojson(ensure_ascii=False) }}{% break %}{% endfor %} {{ mode }}"
    (tmp_path / "chat_template.jinja").write_text(loop)
    assert FileTokenizer(tmp_path).chat(messages, mode="x") == '{"role": "user", "content": "2+2?"} x'


@pytest.mark.parametrize(
    "template, told",
    [
        (None, "has no chat template"),
        ("{{ raise_exception('no user') }}", "no user"),
        ("{% if %}", "fails"),
        ("{{ 1 + 'a' }}", "fails"),
        ("{{ ''.__class__.__mro__ }}", "fails"),
        ("{{ messages.append(1) }}", "fails"),
    ],
)
def test_a_template_that_is_absent_wrong_or_reaches_out_is_an_error(template, told, tmp_path):
    config = {} if template is None else {"chat_template": template}
    with pytest.raises(TokenizerError, match=told):
        FileTokenizer(write(tmp_path, **config)).chat([{"role": "user", "content": "?"}])


def test_what_a_file_says_of_truncation_and_padding_is_left_out(tmp_path):
    inner = Tokenizer.from_file(str(write(tmp_path) / "tokenizer.json"))
    inner.enable_truncation(4)
    inner.enable_padding(length=20)
    inner.save(str(tmp_path / "tokenizer.json"))
    assert len(FileTokenizer(tmp_path).encode("nine more")) == 9


def test_a_tokenizer_is_carried_over_whole_with_its_stop_ids(tmp_path):
    source, out = write(tmp_path / "a", eos=None, chat_template=TEMPLATE), tmp_path / "b"
    (source / "config.json").write_text('{"eos_token_id": [257, 258]}')
    write(out)
    (out / "chat_template.jinja").write_text("of another model")
    carry_over(source, out)
    assert not (out / "chat_template.jinja").exists()
    assert FileTokenizer(out).stop_ids == (257, 258)
    carry_over(None, out, stop_ids=(2,))
    assert not (out / "tokenizer.json").exists()
    assert json.loads((out / "generation_config.json").read_text()) == {"eos_token_id": [2]}


def test_a_damaged_file_is_named(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(TokenizerError, match="tokenizer.json is no tokenizer"):
        FileTokenizer(tmp_path)
    write(tmp_path)
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(TokenizerError, match="generation_config.json is not JSON"):
        FileTokenizer(tmp_path)


def test_byte_order_marks_are_read_past_in_every_file(tmp_path):
    write(tmp_path, chat_template=TEMPLATE)
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    for file in tmp_path.iterdir():
        file.write_bytes(codecs.BOM_UTF8 + file.read_bytes())
    tokenizer = FileTokenizer(tmp_path)
    assert tokenizer.stop_ids == (258,) and tokenizer.chat([{"role": "user", "content": "?"}]).startswith("[gMASK]<")
    (tmp_path / "tokenizer_config.json").write_text("{}", encoding="utf-16")
    with pytest.raises(TokenizerError, match="tokenizer_config.json is UTF-16"):
        FileTokenizer(tmp_path)


def test_a_folder_without_one_is_read_as_bytes(tmp_path):
    assert isinstance(tokenizer_of(tmp_path), ByteTokenizer) and isinstance(tokenizer_of(None), ByteTokenizer)
    assert isinstance(tokenizer_of(write(tmp_path)), FileTokenizer)
