"""Model folders in the public layout: read and written byte for byte, and refused whole when they do not fit."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import glm_jax
from glm_jax.io import hf
from glm_jax.io import tensors as tensors_module
from glm_jax.io.hf import CheckpointError
from glm_jax.model import weights
from glm_jax.model.config import ModelConfigError
from glm_jax.model.quantised import Quantised, dense
from glm_jax.model.target import tracing_for
from glm_jax.sharding import layout
from glm_jax.sharding.mesh import MeshConfig, make_mesh
from tests.model.tiny import named_leaves, random_params, random_tokens, three_layers, two_layers

GOLDEN = Path(__file__).parents[1] / "golden"
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


@pytest.fixture
def folder(tmp_path) -> Path:
    return Path(shutil.copytree(GOLDEN / "tiny", tmp_path / "tiny"))


def tensors_of(folder: Path) -> dict[str, np.ndarray]:
    if not (folder / INDEX).exists():
        return load_file(folder / WEIGHTS)
    where = json.loads((folder / INDEX).read_text())["weight_map"]
    shards = {file: load_file(folder / file) for file in set(where.values())}
    assert sorted(where) == sorted(name for shard in shards.values() for name in shard)
    return {name: shards[file][name] for name, file in where.items()}


def same_bytes(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> bool:
    assert a.keys() == b.keys()
    return all(a[k].dtype == b[k].dtype and a[k].shape == b[k].shape and a[k].tobytes() == b[k].tobytes() for k in a)


def edit(folder: Path, change) -> None:
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS)


@pytest.mark.parametrize("case", ["tiny", "padded", "all_full", "mtp", "yarn"])
@pytest.mark.parametrize("shard_bytes", [5 << 30, 100_000])
def test_every_tensor_comes_back_byte_for_byte(case, shard_bytes, tmp_path):
    config, params = glm_jax.load(GOLDEN / case)
    glm_jax.save(tmp_path / "out", config, params, shard_bytes=shard_bytes)
    written = tensors_of(tmp_path / "out")
    assert same_bytes(written, load_file(GOLDEN / case / WEIGHTS))
    shards = list((tmp_path / "out").glob("*.safetensors"))
    assert (len(shards) > 3 and (tmp_path / "out" / INDEX).exists()) == (shard_bytes == 100_000)
    assert all(shard.stat().st_size < 1.2 * shard_bytes + 1e5 for shard in shards)
    again_config, again = glm_jax.load(tmp_path / "out")
    assert again_config == config
    for name, leaf in named_leaves(params).items():
        np.testing.assert_array_equal(named_leaves(again)[name], leaf, err_msg=name)


def test_what_the_golden_files_do_not_have_comes_back_too(tmp_path):
    config = three_layers(attention_bias=True, tie_word_embeddings=True, n_shared_experts=2, dtype="bfloat16")
    params = random_params(config)
    glm_jax.save(tmp_path / "out", config, params)
    again_config, again = glm_jax.load(tmp_path / "out")
    assert again_config.tie_word_embeddings and again.head is None
    for name, leaf in named_leaves(params).items():
        other = named_leaves(again)[name]
        assert other.dtype == leaf.dtype and (other == leaf).all(), name
    assert "lm_head.weight" not in load_file(tmp_path / "out" / WEIGHTS)
    config_file = json.loads((tmp_path / "out/config.json").read_text())
    assert config_file["model_type"] == "glm_moe_dsa" and config_file["dtype"] == "bfloat16"


def test_a_dtype_can_be_asked_for_and_leaves_the_router_wide():
    config, params = glm_jax.load(GOLDEN / "tiny", dtype="bfloat16")
    assert config.dtype == "bfloat16"
    wide = {name.rpartition(".")[2] for name, leaf in named_leaves(params).items() if leaf.dtype == jnp.float32}
    assert wide == {"router", "bias"}


def test_auto_is_the_dtype_of_the_tensors(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"dtype": "auto"}))
    assert glm_jax.load(folder)[0].dtype == "float32"
    half = lambda tensors: tensors.update({name: t.astype(ml_dtypes.bfloat16) for name, t in tensors.items()})
    edit(folder, half)
    config, params = glm_jax.load(folder)
    assert config.dtype == "bfloat16" and params.norm.dtype == jnp.bfloat16
    edit(folder, lambda tensors: tensors.update({n: t.astype(np.float64) for n, t in tensors.items()}))
    with pytest.raises(CheckpointError, match=r"config.json: dtype is 'auto' and model.embed_tokens.weight is F64"):
        glm_jax.load(folder)


def test_missing_unexpected_and_misshapen_tensors_are_one_error_that_lists_them_all(folder):
    def change(tensors):
        del tensors["model.layers.1.self_attn.indexer.wk.weight"]
        del tensors["model.layers.4.mlp.experts.7.up_proj.weight"]
        tensors["model.layers.2.self_attn.indexer.wk.weight"] = np.zeros((16, 40), np.float32)  # a shared layer
        tensors["lm_head.weight"] = tensors["lm_head.weight"][:-1]
        tensors["model.layers.3.mlp.gate.weight"] = tensors["model.layers.3.mlp.gate.weight"].T.copy()

    edit(folder, change)
    with pytest.raises(CheckpointError) as error:
        glm_jax.load(folder)
    lines = str(error.value).splitlines()
    assert "5 tensors do not fit" in lines[0] and str(folder) in lines[0]
    assert [line.strip() for line in lines[1:]] == [
        "missing model.layers.1.self_attn.indexer.wk.weight (16, 40)",
        "missing model.layers.4.mlp.experts.7.up_proj.weight (16, 40)",
        "unexpected model.layers.2.self_attn.indexer.wk.weight (16, 40)",
        "misshapen lm_head.weight: (255, 40) in the file, (256, 40) by the config",
        "misshapen model.layers.3.mlp.gate.weight: (40, 8) in the file, (8, 40) by the config",
    ]


def test_an_undeclared_draft_layer_and_rotary_buffers_are_passed_over_and_said_so(folder, caplog):
    def change(tensors):
        tensors["model.layers.6.enorm.weight"] = np.zeros(40, np.float32)
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.zeros(4, np.float32)

    edit(folder, change)
    with caplog.at_level(logging.INFO):
        glm_jax.load(folder)
    assert "2 tensors are not read" in caplog.text
    edit(folder, lambda tensors: tensors.update({"model.layers.7.enorm.weight": np.zeros(40, np.float32)}))
    with pytest.raises(CheckpointError, match="unexpected model.layers.7.enorm.weight"):
        glm_jax.load(folder)


def test_a_draft_layer_may_repeat_embedding_and_head_be_absent_or_be_refused_in_part(tmp_path, caplog):
    folder = Path(shutil.copytree(GOLDEN / "mtp", tmp_path / "mtp"))
    _, want = glm_jax.load(folder)

    def repeat(tensors):
        tensors["model.layers.4.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].copy()
        tensors["model.layers.4.shared_head.head.weight"] = tensors["lm_head.weight"].astype(np.float64)

    edit(folder, repeat)
    _, got = glm_jax.load(folder)
    np.testing.assert_array_equal(got.draft.proj, want.draft.proj)
    edit(folder, lambda tensors: tensors.pop("model.layers.4.eh_proj.weight"))
    with pytest.raises(CheckpointError, match=r"missing model.layers.4.eh_proj.weight \(40, 80\)"):
        glm_jax.load(folder)
    edit(folder, lambda tensors: [tensors.pop(n) for n in list(tensors) if n.startswith("model.layers.4.")])
    with caplog.at_level(logging.INFO):
        config, params = glm_jax.load(folder)  # as transformers saves it
    assert config.num_nextn_predict_layers == 0 and params.draft is None and "the files hold none" in caplog.text


@pytest.mark.parametrize("at_once", [1 << 22, 100])
def test_a_tied_head_may_repeat_the_embedding_and_nothing_else(at_once, tmp_path, monkeypatch):
    monkeypatch.setattr(tensors_module, "AT_ONCE", at_once)
    config = two_layers(tie_word_embeddings=True)
    glm_jax.save(tmp_path, config, random_params(config))
    edit(tmp_path, lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"].copy()}))
    assert glm_jax.load(tmp_path)[1].head is None
    edit(tmp_path, lambda tensors: tensors["lm_head.weight"].__setitem__((-1, -1), 7.0))
    with pytest.raises(CheckpointError, match="lm_head.weight differs from model.embed_tokens.*the embedding the head"):
        glm_jax.load(tmp_path)
    edit(tmp_path, lambda tensors: tensors.update({"lm_head.weight": tensors["lm_head.weight"][:-1]}))
    with pytest.raises(CheckpointError, match="lm_head.weight differs"):
        glm_jax.load(tmp_path)


def test_a_draft_layer_with_a_head_of_its_own_is_refused(tmp_path):
    folder = Path(shutil.copytree(GOLDEN / "mtp", tmp_path / "mtp"))
    head = "model.layers.4.shared_head.head.weight"
    edit(folder, lambda tensors: tensors.update({head: tensors["model.embed_tokens.weight"].copy()}))
    with pytest.raises(CheckpointError, match=f"{head} differs from lm_head.weight and would be lost"):
        glm_jax.load(folder)


def in_fp8(tensors: dict[str, np.ndarray], names: list[str], powers: bool = False) -> dict[str, np.ndarray]:
    """The release layout of these tensors by another way than the reader's: block by block. Returns what they mean.

    With `powers` the scales are powers of two and stored as their exponents, UE8M0.
    """
    meant = {}
    for name in names:
        value = tensors[name]
        rows, columns = (-(-n // 128) for n in value.shape)
        scale = np.random.default_rng(0).uniform(0.5, 2.0, (rows, columns)).astype(np.float32)
        stored = scale
        if powers:
            exponent = np.random.default_rng(0).integers(-3, 4, (rows, columns))
            scale, stored = (2.0**exponent).astype(np.float32), (exponent + 127).astype(np.uint8)
        small, back = np.zeros(value.shape, ml_dtypes.float8_e4m3fn), np.zeros(value.shape, np.float32)
        for r in range(rows):
            for c in range(columns):
                block = (slice(128 * r, 128 * (r + 1)), slice(128 * c, 128 * (c + 1)))
                small[block] = value[block] / scale[r, c]
                back[block] = small[block].astype(np.float32) * scale[r, c]
        tensors[name], tensors[name + "_scale_inv"], meant[name] = small, stored, back
    return meant


def save_with_fp8(tensors: dict[str, np.ndarray], path: Path) -> None:
    """The file format by hand: the length of a JSON header, the header, the bytes."""
    kinds = {"float32": "F32", "float8_e4m3fn": "F8_E4M3", "uint8": "F8_E8M0"}
    header, body = {}, b""
    for name, value in tensors.items():
        offsets = [len(body), len(body) + value.nbytes]
        header[name] = {"dtype": kinds[value.dtype.name], "shape": value.shape, "data_offsets": offsets}
        body += value.tobytes()
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + body)


def test_the_fp8_release_layout_is_read_and_its_faults_are_named(tmp_path):
    shape = dict(hidden_size=160, intermediate_size=200, moe_intermediate_size=136)
    config = three_layers(**shape)
    glm_jax.save(tmp_path / "plain", config, random_params(config))
    tensors = load_file(tmp_path / "plain" / WEIGHTS)
    kinds = ("q_a_proj", "o_proj", "kv_b_proj", "wq_b", "gate_proj", "up_proj", "down_proj")
    names = [n for n in tensors if n.split(".")[-2] in kinds]
    meant = in_fp8(tensors, names)
    folder = Path(shutil.copytree(tmp_path / "plain", tmp_path / "fp8"))
    save_with_fp8(tensors, folder / WEIGHTS)
    save_file({**load_file(tmp_path / "plain" / WEIGHTS), **meant}, tmp_path / "plain" / WEIGHTS)
    for dtype in ("float32", "bfloat16"):
        want, got = (named_leaves(glm_jax.load(f, dtype=dtype)[1]) for f in (tmp_path / "plain", folder))
        for name, leaf in want.items():
            np.testing.assert_array_equal(got[name], leaf, err_msg=name)

    del tensors[names[0] + "_scale_inv"]
    tensors[names[1] + "_scale_inv"] = np.ones((9, 9), np.float32)
    tensors["model.norm.weight_scale_inv"] = np.ones((2,), np.float32)
    save_with_fp8(tensors, folder / WEIGHTS)
    with pytest.raises(CheckpointError, match="3 tensors do not fit") as error:
        glm_jax.load(folder)
    assert f"missing {names[0]}_scale_inv" in str(error.value)
    assert f"misshapen {names[1]}_scale_inv: (9, 9)" in str(error.value)
    assert "unexpected model.norm.weight_scale_inv" in str(error.value)


@pytest.mark.parametrize("powers", [False, True])
@pytest.mark.parametrize("ending", ["_scale_inv", "_scale"])
def test_scales_are_read_under_either_name_as_numbers_or_as_powers_of_two(powers, ending, tmp_path):
    config = two_layers(hidden_size=160, q_lora_rank=144)
    glm_jax.save(tmp_path, config, random_params(config))
    tensors = load_file(tmp_path / WEIGHTS)
    name = "model.layers.0.self_attn.q_a_proj.weight"
    meant = in_fp8(tensors, [name], powers)[name].T
    tensors[name + ending] = tensors.pop(name + "_scale_inv")
    save_with_fp8(tensors, tmp_path / WEIGHTS)
    weight = lambda **how: glm_jax.load(tmp_path, **how)[1].groups[0][0].attn.q_a
    np.testing.assert_array_equal(weight(), meant)
    kept = weight(keep_fp8=True)
    assert isinstance(kept, Quantised)
    np.testing.assert_array_equal(dense(kept, jnp.float32), meant)


def test_scales_under_both_names_or_of_another_kind_are_refused(tmp_path):
    config = two_layers()
    glm_jax.save(tmp_path, config, random_params(config))
    tensors = load_file(tmp_path / WEIGHTS)
    names = [f"model.layers.{i}.self_attn.q_a_proj.weight" for i in (0, 1)]
    in_fp8(tensors, names)
    tensors[names[0] + "_scale"] = tensors[names[0] + "_scale_inv"]
    tensors[names[1] + "_scale_inv"] = tensors[names[1] + "_scale_inv"].astype(ml_dtypes.float8_e4m3fn)
    save_with_fp8(tensors, tmp_path / WEIGHTS)
    with pytest.raises(CheckpointError, match="2 tensors do not fit") as error:
        glm_jax.load(tmp_path)
    assert f"unexpected {names[0]}_scale (1, 1)" in str(error.value)
    assert f"{names[1]}_scale_inv is F8_E4M3: scales are F64, F32, F16, BF16, F8_E8M0" in str(error.value)


def fp8_folder(path: Path) -> Path:
    """A model with a draft layer whose matrices are FP8 as released: heads and experts end within blocks."""
    shape = dict(hidden_size=160, intermediate_size=200, moe_intermediate_size=136, num_nextn_predict_layers=1)
    config = three_layers(**shape, kv_lora_rank=144, num_attention_heads=3, qk_nope_head_dim=40, v_head_dim=48)
    glm_jax.save(path, config, random_params(config))
    tensors = load_file(path / WEIGHTS)
    in_fp8(tensors, [n for n, t in tensors.items() if t.ndim == 2 and "embed_tokens" not in n and ".gate." not in n])
    save_with_fp8(tensors, path / WEIGHTS)
    return path


def test_what_is_kept_in_fp8_runs_as_what_is_widened_and_is_saved_to_the_same_bytes(tmp_path):
    folder = fp8_folder(tmp_path / "fp8")
    config, wide = glm_jax.load(folder)
    _, kept = glm_jax.load(folder, keep_fp8=True)
    size = lambda params: sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    assert size(kept) < 0.4 * size(wide)
    tokens = random_tokens(config, 2, 12)
    run = jax.jit(lambda params, tokens: glm_jax.forward(params, config, tokens, draft=True))
    want, got = run(wide, tokens), run(kept, tokens)
    np.testing.assert_allclose(got.logits, want.logits, atol=1e-5)
    np.testing.assert_allclose(got.draft.logits, want.draft.logits, atol=1e-5)
    prompts = tokens.tolist()
    assert glm_jax.generate(kept, config, prompts, 4) == glm_jax.generate(wide, config, prompts, 4)
    with tracing_for("gpu"):
        shorter = jax.jit(lambda params, tokens: glm_jax.forward(params, config, tokens).logits)(kept, tokens[:, :11])
    np.testing.assert_allclose(shorter, want.logits[:, :11], atol=1e-4)

    glm_jax.save(tmp_path / "again", config, kept)
    assert bytes_of(tmp_path / "again" / WEIGHTS) == bytes_of(folder / WEIGHTS)
    assert json.loads((tmp_path / "again/config.json").read_text())["quantization_config"]["quant_method"] == "fp8"
    _, again = glm_jax.load(tmp_path / "again", keep_fp8=True)
    for name, leaf in named_leaves(kept).items():
        np.testing.assert_array_equal(named_leaves(again)[name], leaf, err_msg=name)


def bytes_of(file: Path) -> dict[str, tuple]:
    """Shape, type and bytes of each tensor, by the header alone."""
    data = file.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    header.pop("__metadata__", None)
    return {
        n: (t["dtype"], t["shape"], data[start + t["data_offsets"][0] : start + t["data_offsets"][1]])
        for n, t in header.items()
    }


def test_what_is_kept_in_fp8_goes_straight_to_its_shards(tmp_path):
    folder = fp8_folder(tmp_path / "fp8")
    config, want = glm_jax.load(folder, keep_fp8=True)
    mesh = make_mesh(MeshConfig(fsdp=2, tensor=1, expert=2))
    shardings = layout.shardings(weights.abstract(config), layout.LEARN, mesh)
    _, params = glm_jax.load(folder, shardings=shardings, keep_fp8=True)
    for name, leaf in named_leaves(params).items():
        np.testing.assert_array_equal(leaf, named_leaves(want)[name], err_msg=name)
    down = params.groups[1][0].mlp.experts.down
    assert not down.value.sharding.is_fully_replicated and not down.scale.sharding.is_fully_replicated


@pytest.mark.parametrize("axes", [{"fsdp": 4, "expert": 2}, {"tensor": 2, "data": 2}])
def test_parameters_go_straight_to_their_shards(axes):
    config, want = glm_jax.load(GOLDEN / "mtp")
    mesh = make_mesh(MeshConfig(**axes))
    shardings = layout.shardings(weights.abstract(config), layout.LEARN, mesh)
    _, params = glm_jax.load(GOLDEN / "mtp", shardings=shardings)
    placed, whole = named_leaves(params), named_leaves(want)
    assert any(not leaf.sharding.is_fully_replicated for leaf in placed.values())
    for (name, leaf), sharding in zip(placed.items(), jax.tree.leaves(shardings), strict=True):
        assert leaf.sharding == sharding, name
        np.testing.assert_array_equal(leaf, whole[name], err_msg=name)


def test_nan_and_integer_weights_are_named(folder):
    def change(tensors):
        tensors["model.layers.3.mlp.experts.2.up_proj.weight"][1, 1] = np.nan

    edit(folder, change)
    with pytest.raises(CheckpointError, match=r"model.layers.3.mlp.experts.2.up_proj.weight holds NaN"):
        glm_jax.load(folder)
    edit(folder, lambda tensors: tensors.update({"model.norm.weight": np.ones(40, np.int8)}))
    with pytest.raises(CheckpointError, match="model.norm.weight is I8: weights are F64, F32"):
        glm_jax.load(folder)


@pytest.mark.parametrize("size", [0, 7, 5_000, 500_000])
def test_a_truncated_file_is_named(folder, size):
    whole = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(whole[:size])
    with pytest.raises(CheckpointError, match=rf"{WEIGHTS} is damaged or truncated"):
        glm_jax.load(folder)


@pytest.mark.parametrize(
    "text", ["{", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {"x": 3, "y": "a"}}', "[" * 5000]
)
def test_a_damaged_index_is_named(folder, text):
    (folder / INDEX).write_text(text)
    with pytest.raises(CheckpointError, match=INDEX):
        glm_jax.load(folder)


def test_an_absent_shard_is_named(folder):
    names = {name: "model-00001-of-00001.safetensors" for name in load_file(folder / WEIGHTS)}
    (folder / INDEX).write_text(json.dumps({"weight_map": names}))
    with pytest.raises(CheckpointError, match="lacks model-00001-of-00001.safetensors"):
        glm_jax.load(folder)


def test_of_two_copies_of_a_tensor_the_one_is_read_that_the_index_names(folder):
    tensors = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).rename(folder / "a.safetensors")
    stale = {"model.norm.weight": np.zeros(40, np.float32), "lm_head.weight": tensors["lm_head.weight"]}
    save_file(stale, folder / "b.safetensors")
    shard = {name: "a.safetensors" for name in tensors} | {"lm_head.weight": "b.safetensors"}
    (folder / INDEX).write_text(json.dumps({"weight_map": shard}))
    np.testing.assert_array_equal(glm_jax.load(folder)[1].norm, tensors["model.norm.weight"])


def test_tensors_that_the_index_gives_to_a_file_without_them_are_one_error(folder):
    shard = {name: WEIGHTS for name in [*load_file(folder / WEIGHTS), "b", "a"]}
    (folder / INDEX).write_text(json.dumps({"weight_map": shard}))
    with pytest.raises(CheckpointError) as error:
        glm_jax.load(folder)
    lines = [line.strip() for line in str(error.value).splitlines()]
    assert "is wrong about 2 tensors" in lines[0] and INDEX in lines[0]
    assert lines[1:] == [f"a is not in {WEIGHTS}", f"b is not in {WEIGHTS}"]


@pytest.mark.parametrize("file", ["/tmp/a.safetensors", "../a.safetensors", "x/../../a.safetensors", "..\\a"])
def test_an_index_that_leaves_its_folder_is_refused(folder, file):
    (folder / INDEX).write_text(json.dumps({"weight_map": {"x": WEIGHTS, "y": file}}))
    with pytest.raises(CheckpointError, match="names files outside its folder") as error:
        glm_jax.load(folder)
    assert file in str(error.value)


def test_a_key_that_stands_twice_in_a_json_file_is_refused(folder):
    (folder / INDEX).write_text('{"weight_map": {"x": "a", "y": "a", "x": "b"}}')
    with pytest.raises(CheckpointError, match=f"{INDEX} is not usable JSON: it has x more than once"):
        glm_jax.load(folder)


@pytest.mark.parametrize("text", ["{", "[]"])
def test_a_damaged_config_is_named(folder, text):
    (folder / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match="config.json"):
        glm_jax.load(folder)


def test_a_byte_order_mark_is_read_past_and_another_encoding_named(folder):
    path = folder / "config.json"
    want, text = hf.read_config(folder), path.read_text()
    path.write_text(text, encoding="utf-8-sig")
    assert hf.read_config(folder) == want
    path.write_text(text, encoding="utf-16")
    with pytest.raises(CheckpointError, match="config.json is UTF-16 by its first bytes: save it as UTF-8"):
        hf.read_config(folder)


def test_a_folder_without_config_or_without_weights_is_no_model(folder, tmp_path):
    with pytest.raises(CheckpointError, match="holds no config.json"):
        glm_jax.load(tmp_path)
    (folder / WEIGHTS).unlink()
    with pytest.raises(CheckpointError, match=f"lacks {WEIGHTS}"):
        glm_jax.load(folder)


def test_another_architecture_is_refused_by_name(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "deepseek_v32"}))
    with pytest.raises(ModelConfigError, match="model_type is 'deepseek_v32'"):
        glm_jax.load(folder)


@pytest.mark.parametrize("first, second", [(100_000, 5 << 30), (5 << 30, 100_000), (50_000, 200_000)])
def test_saving_over_a_model_leaves_nothing_of_it(first, second, tmp_path):
    config, params = glm_jax.load(GOLDEN / "tiny")
    glm_jax.save(tmp_path / "out", config, jax.tree.map(jnp.zeros_like, params), shard_bytes=first)
    (tmp_path / "out/tokenizer.json").write_text("kept")
    glm_jax.save(tmp_path / "out", config, params, shard_bytes=second)
    _, again = glm_jax.load(tmp_path / "out")
    np.testing.assert_array_equal(again.embed, params.embed)
    glm_jax.save(tmp_path / "fresh", config, params, shard_bytes=second)
    fresh = {file.name for file in (tmp_path / "fresh").iterdir()}
    assert {file.name for file in (tmp_path / "out").iterdir()} == fresh | {"tokenizer.json"}


def test_what_an_interrupted_save_left_behind_does_not_enter_the_next(tmp_path):
    config, params = glm_jax.load(GOLDEN / "tiny")
    left = tmp_path / "out/.partial"
    left.mkdir(parents=True)
    (left / INDEX).write_text("{}")
    glm_jax.save(tmp_path / "out", config, params)
    assert same_bytes(tensors_of(tmp_path / "out"), load_file(GOLDEN / "tiny" / WEIGHTS))
    assert not left.exists()
