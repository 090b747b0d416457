"""The verbs that work on model folders: convert, and generate with a folder's own tokenizer."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import glm_jax
from glm_jax.cli.main import main
from tests.data.test_file_tokenizer import TEMPLATE, write
from tests.model.tiny import named_leaves, random_params, two_layers

GOLDEN = Path(__file__).parents[1] / "golden"


def test_convert_writes_another_dtype_in_files_of_the_size_asked_for(tmp_path, capsys):
    out = tmp_path / "out"
    assert main(["convert", str(GOLDEN / "mtp"), str(out), "--dtype", "bfloat16", "--file_gib", "1e-4"]) == 0
    told = capsys.readouterr().out
    assert "parameters in bfloat16" in told and str(out) in told
    files = sorted(out.glob("model-*.safetensors"))
    assert len(files) > 3 and all(file.stat().st_size < 1.3e-4 * 2**30 for file in files)
    _, want = glm_jax.load(GOLDEN / "mtp", dtype="bfloat16")
    config, got = glm_jax.load(out)
    assert config.dtype == "bfloat16" and config.num_nextn_predict_layers == 1
    for name, leaf in named_leaves(want).items():
        np.testing.assert_array_equal(named_leaves(got)[name], leaf, err_msg=name)


def test_convert_takes_the_tokenizer_along_and_never_writes_over_its_source(tmp_path, capsys):
    config = two_layers(vocab_size=264)
    model = tmp_path / "model"
    glm_jax.save(model, config, random_params(config))
    write(model, chat_template=TEMPLATE)
    assert main(["convert", str(model), str(tmp_path / "out")]) == 0
    assert (tmp_path / "out/tokenizer.json").read_bytes() == (model / "tokenizer.json").read_bytes()
    assert main(["convert", str(model), str(model)]) == 2
    assert "is the model itself" in capsys.readouterr().err


def test_generate_reads_and_writes_with_the_folders_tokenizer(tmp_path, capsys):
    config = two_layers(vocab_size=264)
    glm_jax.save(tmp_path, config, random_params(config))
    write(tmp_path, chat_template=TEMPLATE)
    ask = ["generate", str(tmp_path), "--prompt", "hi", "--max_new_tokens", "3"]
    assert main(ask) == 0
    plain = capsys.readouterr().out
    assert plain.startswith("hi")
    assert main([*ask, "--chat"]) == 0
    assert capsys.readouterr().out != plain[2:], "the template's tokens stand before the answer"
    answer = plain.removeprefix("hi").rstrip("\n")
    assert main([*ask, "--stop", answer[:1]]) == 0
    assert len(capsys.readouterr().out) < len(plain), "the first token ends it"
    assert main([*ask, "--stop", ""]) == 2
    assert "stop string 0 is empty" in capsys.readouterr().err
    (tmp_path / "tokenizer.json").unlink()
    assert main([*ask, "--chat"]) == 2
    assert "no chat template" in capsys.readouterr().err


def test_a_tokenizer_that_is_not_the_models_is_told(tmp_path, capsys):
    config = two_layers(vocab_size=256)
    glm_jax.save(tmp_path, config, random_params(config))
    write(tmp_path)
    assert main(["generate", str(tmp_path), "--prompt", "hi"]) == 2
    assert "256 token ids and its tokenizer 259" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["{", json.dumps({"model_type": "llama"})])
def test_a_folder_that_is_no_such_model_is_told(text, tmp_path, capsys):
    (tmp_path / "config.json").write_text(text)
    assert main(["convert", str(tmp_path), str(tmp_path / "out")]) == 1
    assert "config.json" in (told := capsys.readouterr().err) or "llama" in told
    assert not (tmp_path / "out").exists()
