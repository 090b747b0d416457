"""The tokenizer that lies beside a model's weights: `tokenizer.json`, its stop ids and its chat template."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from glm_jax.text import TextError, read_text

FILE = "tokenizer.json"
# What belongs to the tokenizer in a model folder, for copying it along.
GENERATION = "generation_config.json"
FILES = (FILE, "tokenizer_config.json", "special_tokens_map.json", GENERATION, "chat_template.jinja")


class TokenizerError(ValueError):
    """A tokenizer's files that cannot be read, or do not say what is asked of them."""


class FileTokenizer:
    """A `tokenizer.json` as the `tokenizers` library runs it. Special tokens in a text are read as what they are."""

    def __init__(self, folder: Path):
        self.folder = folder
        try:
            self._tokenizer = Tokenizer.from_str(read_text(folder / FILE))
        except Exception as error:  # the library raises a bare Exception
            raise TokenizerError(f"{folder / FILE} is no tokenizer: {error}") from None
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values()) + 1
        added = self._tokenizer.get_added_tokens_decoder()
        self.tags = {token.content: id for id, token in added.items()}
        longest = sorted((tag for tag in self.tags if len(tag) > 1), key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, longest)) or r"(?!)")
        self._config = _read(folder / "tokenizer_config.json")
        self.stop_ids = self._stops(vocabulary)
        self.eos_id = self.stop_ids[0]

    def _stops(self, vocabulary: Mapping[str, int]) -> tuple[int, ...]:
        """The ids that end an answer, by the first file that names some."""
        for name in (GENERATION, "config.json"):
            found = _read(self.folder / name).get("eos_token_id")
            if found not in (None, []):
                return tuple(found) if isinstance(found, list) else (found,)
        token = self._config.get("eos_token")
        text = token.get("content") if isinstance(token, dict) else token
        if text not in vocabulary:
            raise TokenizerError(
                f"{self.folder} does not say which token ends an answer: give generation_config.json an eos_token_id"
            )
        return (vocabulary[text],)

    def fits(self, vocab_size: int) -> bool:
        """Whether a model of so many ids has one for every token; it may have more, which pad its embedding."""
        return self.vocab_size <= vocab_size

    def encode(self, text: str) -> list[int]:
        """The ids of `text`, without what the tokenizer would add around it."""
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def plain(self, text: str) -> list[int]:
        """The ids of a text that a program wrote: a special token in it gets a space, and with that means nothing."""
        return self.encode(self._special.sub(lambda match: f"{match[0][0]} {match[0][1:]}", text))

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`; one stop id at the end is dropped, other special tokens are shown."""
        ids = [int(i) for i in ids]
        ids = ids[:-1] if ids and ids[-1] in self.stop_ids else ids
        return self._tokenizer.decode(ids, skip_special_tokens=False)

    def chat(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> str:
        """Messages ({"role", "content"}) as the model's chat template writes them, up to where the answer begins.

        The template comes with the weights, so it runs in jinja's sandbox. Raises TokenizerError where there is none,
        or it fails.
        """
        from jinja2 import TemplateError
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        def refuse(message: str):
            raise TemplateError(message)

        def to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
            return json.dumps(value, ensure_ascii=ensure_ascii, **options)

        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.globals["raise_exception"] = refuse
        environment.filters["tojson"] = to_json
        special = {k: v["content"] if isinstance(v, dict) else v for k, v in self._config.items() if k[-6:] == "_token"}
        values = {**special, "messages": messages, "add_generation_prompt": True, **variables}
        try:
            return environment.from_string(self._template()).render(values)
        except Exception as error:  # a template may raise anything
            raise TokenizerError(f"the chat template of {self.folder} fails: {error}") from None

    def _template(self) -> str:
        file = self.folder / "chat_template.jinja"
        if file.is_file():
            return read_text(file)
        template = self._config.get("chat_template")
        if isinstance(template, list):  # several by name
            template = {t["name"]: t["template"] for t in template}.get("default")
        if template is None:
            raise TokenizerError(f"{self.folder} has no chat template: give the prompt as the model is to read it")
        return template


def carry_over(source: Path | None, out: Path, stop_ids: Sequence[int] = ()) -> None:
    """Puts the tokenizer's files of the model folder `source` into `out`, and nothing else of that kind.

    Readers of `out` learn the stop ids from its generation_config.json: where there is none, it is written, with what
    the source's config.json says or else `stop_ids`.
    """
    out.mkdir(parents=True, exist_ok=True)
    for name in FILES:
        if source is not None and (source / name).is_file():
            shutil.copyfile(source / name, out / name)
        else:
            (out / name).unlink(missing_ok=True)
    named = _read(source / "config.json").get("eos_token_id") if source is not None else None
    found = named if named not in (None, []) else list(stop_ids)
    if found != [] and not (out / GENERATION).is_file():
        (out / GENERATION).write_text(json.dumps({"eos_token_id": found}) + "\n")


def _read(file: Path) -> dict:
    if not file.is_file():
        return {}
    try:
        value = json.loads(read_text(file))
    except TextError as error:
        raise TokenizerError(str(error)) from None
    except ValueError as error:
        raise TokenizerError(f"{file} is not JSON: {error}") from None
    return value if isinstance(value, dict) else {}
