"""Checkpoints that cannot be loaded: each a message, and nothing read before it is certain that all is there."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from halma.hal.errors import ModelError
from halma.models.deepseek_v4.checkpoint import (
    load_case,
    load_checkpoint,
    load_source,
    require_mtp,
)
from halma.models.deepseek_v4.config import V4Config
from halma.models.deepseek_v4.names import to_transformers
from halma.models.deepseek_v4.sources import DictSource, TransformersSource
from halma.models.deepseek_v4.synthetic import small_config, synthetic_tensors, write_checkpoint
from halma.models.deepseek_v4.tensor_files import INDEX, SINGLE
from tests.cpu.model.loading import refused

Tensors = dict[str, torch.Tensor]


def changed(change: Callable[[Tensors], Any]) -> ModelError:
    tensors = synthetic_tensors(small_config())
    change(tensors)
    with pytest.raises(ModelError) as error:
        load_source(small_config(), DictSource(tensors))
    assert error.value.asked and error.value.found and error.value.do
    return error.value


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "model", small_config(), synthetic_tensors(small_config()))


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "sharded", small_config(), synthetic_tensors(small_config()), shards=3)


# -- directories and files ---------------------------------------------------------------------------------


def test_the_good_ones_load(checkpoint: Path, sharded: Path):
    """The control of every refusal below."""
    assert len(load_checkpoint(checkpoint).weights.layers) == len(load_checkpoint(sharded).weights.layers) == 4


def test_no_directory(tmp_path: Path):
    assert "nothing of that name" in str(refused(tmp_path / "absent"))
    (tmp_path / "file").write_text("")
    assert "a file" in str(refused(tmp_path / "file"))


def test_directory_without_weights(tmp_path: Path):
    assert "it holds: nothing" in str(refused(tmp_path))
    (tmp_path / "pytorch_model.bin").write_text("")
    assert "pytorch_model.bin" in str(refused(tmp_path))


def test_no_configuration(checkpoint: Path):
    (checkpoint / "config.json").unlink()
    assert "the configuration is missing" in str(refused(checkpoint))


@pytest.mark.usefixtures("nothing_read")
def test_another_architecture(checkpoint: Path):
    raw = json.loads((checkpoint / "config.json").read_text()) | {"model_type": "deepseek_v41"}
    (checkpoint / "config.json").write_text(json.dumps(raw))
    assert "different architecture" in str(refused(checkpoint))


@pytest.mark.usefixtures("nothing_read")
@pytest.mark.parametrize("keep", [0, 4, 8, 1000, -1])
def test_truncated_file(checkpoint: Path, keep: int):
    path = checkpoint / SINGLE
    path.write_bytes(path.read_bytes()[:keep])
    error = refused(checkpoint)
    assert error.what == "a checkpoint file is truncated or damaged" and str(path) in error.asked


@pytest.mark.usefixtures("nothing_read")
@pytest.mark.parametrize(
    "header",
    [
        b"\xff\xfe",
        b"not json",
        b"[]",
        b'{"embed.weight": 3}',
        b'{"embed.weight": {"dtype": "BF16", "shape": [-1], "data_offsets": [0, 8]}}',
        b'{"embed.weight": {"dtype": "BF16", "shape": [4], "data_offsets": [8, 0]}}',
        b'{"embed.weight": {"dtype": "BF16", "shape": [4], "data_offsets": [0, 6]}}',
        b'{"embed.weight": {"dtype": "BF16", "shape": [4], "data_offsets": [0]}}',
        b'{"embed.weight": {"dtype": "BF16", "shape": [2147483648], "data_offsets": [0, 4294967296]}}',
    ],
)
def test_damaged_header(checkpoint: Path, header: bytes):
    (checkpoint / SINGLE).write_bytes(len(header).to_bytes(8, "little") + header + bytes(64))
    assert refused(checkpoint).what == "a checkpoint file is truncated or damaged"


@pytest.mark.usefixtures("nothing_read")
def test_missing_shard(sharded: Path):
    path = sorted(sharded.glob("*.safetensors"))[1]
    path.unlink()
    error = refused(sharded)
    assert "1 of the checkpoint's 3 files are missing" in error.what and path.name in error.found[0]


@pytest.mark.usefixtures("nothing_read")
def test_index_and_files_disagree(sharded: Path):
    raw = json.loads((sharded / INDEX).read_text())
    raw["weight_map"]["layers.9.extra"] = raw["weight_map"]["embed.weight"]
    (sharded / INDEX).write_text(json.dumps(raw))
    assert "layers.9.extra is not in" in str(refused(sharded))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "not valid JSON"),
        ("[]", "not a JSON object"),
        ("{}", "holds no weight_map"),
        ('{"weight_map": {}}', "holds no weight_map"),
        ('{"weight_map": {"a": 3}}', "holds no weight_map"),
        ('{"weight_map": {"a": "../../secret.safetensors"}}', "points outside"),
        ('{"weight_map": {"a": "/etc/secret.safetensors"}}', "points outside"),
    ],
)
def test_bad_index(sharded: Path, text: str, words: str):
    (sharded / INDEX).write_text(text)
    assert words in refused(sharded).what


# -- tensors -----------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("nothing_read")
def test_missing_tensor_is_named_with_the_nearest_present():
    def rename(tensors: Tensors) -> None:
        tensors["layers.1.attn.wq_bb.weight"] = tensors.pop("layers.1.attn.wq_b.weight")

    error = changed(rename)
    assert error.found == ("layers.1.attn.wq_b.weight is missing; the nearest present is layers.1.attn.wq_bb.weight",)


@pytest.mark.usefixtures("nothing_read")
def test_many_missing_tensors_are_counted():
    error = changed(lambda tensors: [tensors.pop(n) for n in list(tensors) if n.startswith("layers.2.ffn.")])
    assert len(error.found) == 9 and error.found[-1].startswith("and ") and "layers.2.ffn.gate.weight" in str(error)


@pytest.mark.usefixtures("nothing_read")
@pytest.mark.parametrize("stem", ["layers.0.attn.wo_b", "layers.3.ffn.experts.4.w2", "mtp.0.e_proj"])
def test_missing_scale(stem: str):
    error = changed(lambda tensors: tensors.pop(f"{stem}.scale"))
    assert f"{stem}.scale is missing; {stem}.weight is" in error.found[0] and len(error.found) == 1


@pytest.mark.usefixtures("nothing_read")
@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("embed.weight", (198, 128)),
        ("norm.weight", (64,)),
        ("layers.0.hc_attn_fn", (20, 512)),
        ("layers.1.attn.compressor.ape", (8, 128)),
        ("layers.0.ffn.gate.tid2eid", (199, 2)),
        ("layers.2.ffn.gate.bias", (7,)),
    ],
)
def test_wrong_shape(name: str, shape: tuple[int, ...]):
    error = changed(lambda tensors: tensors.update({name: torch.zeros(shape, dtype=tensors[name].dtype)}))
    assert name in error.found[0] and str(list(shape)) in error.found[0] and "must be" in error.found[0]


@pytest.mark.usefixtures("nothing_read")
@pytest.mark.parametrize(
    ("name", "dtype", "words"),
    [
        ("layers.0.attn.wq_b.scale", torch.float32, "must be F8_E8M0"),
        (
            "layers.1.ffn.gate.weight",
            torch.int8,
            "must be plain",
        ),  # a router in few bits (Avarok-Cybersecurity/atlas#186)
        ("layers.1.ffn.gate.weight", torch.float8_e4m3fn, "must be plain"),
        ("layers.1.attn.wq_b.weight", torch.int8, "must be plain or fp8_block128"),
        ("layers.1.ffn.experts.0.w1.weight", torch.bfloat16, "must be one format"),
        ("norm.weight", torch.int32, "must be float64 or float32"),
        ("layers.0.ffn.gate.tid2eid", torch.float32, "must be int64 or int32"),
    ],
)
def test_wrong_dtype(name: str, dtype: torch.dtype, words: str):
    error = changed(lambda tensors: tensors.update({name: torch.zeros(tensors[name].shape).to(dtype)}))
    assert words in str(error) and name.rpartition(".")[0] in str(error)


@pytest.mark.usefixtures("nothing_read")
def test_unknown_stored_type_is_named(checkpoint: Path):
    path = checkpoint / SINGLE
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    header["norm.weight"]["dtype"] = "F4"
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + length :])
    assert "norm.weight is F4; must be" in str(refused(checkpoint))


@pytest.mark.parametrize("value", [-1, 8])
def test_expert_table_that_points_outside(value: int):
    def spoil(tensors: Tensors) -> None:
        tensors["layers.0.ffn.gate.tid2eid"][5, 1] = value

    assert "must be 0 to 7" in changed(spoil).found[0]


@pytest.mark.usefixtures("nothing_read")
def test_missing_tensors_keep_transformers_names():
    tensors = to_transformers(synthetic_tensors(small_config(), plain=True), mtp=True)
    tensors.pop("model.layers.1.mlp.experts.down_proj")
    with pytest.raises(ModelError) as error:
        load_source(small_config(), TransformersSource(DictSource(tensors)))
    assert len(error.value.found) == 1 and "model.layers.1.mlp.experts.down_proj is missing" in error.value.found[0]


@pytest.mark.usefixtures("nothing_read")
def test_stacked_experts_of_the_wrong_number():
    tensors = to_transformers(synthetic_tensors(small_config(), plain=True), mtp=True)
    name = "model.layers.1.mlp.experts.down_proj"
    tensors[name] = tensors[name][:5].clone()
    with pytest.raises(ModelError) as error:
        load_source(small_config(), TransformersSource(DictSource(tensors)))
    assert name in error.value.found[0] and "shape" in error.value.found[0]


def test_cases_without_a_model(tmp_path: Path):
    with pytest.raises(ModelError, match="no such"):
        load_case(tmp_path / "absent.safetensors")
    path = tmp_path / "case.safetensors"
    save_file({"input.ids": torch.zeros(1)}, str(path))
    with pytest.raises(ModelError, match="brings no configuration"):
        load_case(path)
    save_file({"input.ids": torch.zeros(1)}, str(path), metadata={"config": "{"})
    with pytest.raises(ModelError, match="not valid JSON"):
        load_case(path)
    config = json.dumps(small_config().to_dict())
    save_file({"input.ids": torch.zeros(1)}, str(path), metadata={"official_config": config})
    with pytest.raises(ModelError, match=r"model\.embed_tokens\.weight is missing"):
        load_case(path)


# -- drafters ----------------------------------------------------------------------------------------------


def dspark_tensors() -> Tensors:
    tensors = {name: t for name, t in synthetic_tensors(small_config()).items() if not name.startswith("mtp.")}
    tensors["mtp.0.main_proj.weight"] = torch.zeros(4, 4)
    tensors["mtp.2.markov_head.weight"] = torch.zeros(4, 4)
    return tensors


@pytest.mark.parametrize("declared", [True, False])
def test_dspark_leaves_the_target_running(declared: bool):
    raw = small_config().to_dict()
    if declared:
        raw |= {"dspark_block_size": 5, "compress_ratios": [0, 4, 16, 4, 0, 0, 0]}
    found = load_source(V4Config.from_dict(raw), DictSource(dspark_tensors()))
    assert found.config.drafter == "dspark" and found.weights.mtp == () and len(found.weights.layers) == 4
    assert len(found.notes) == 1 and "DSpark" in found.notes[0]
    with pytest.raises(ModelError, match="MTP is not available") as error:
        require_mtp(found.config)
    assert "DSpark" in error.value.found[0] and "target model alone runs" in error.value.do[0]


def test_promised_drafter_that_is_absent_or_unannounced():
    config = small_config()
    tensors = synthetic_tensors(config)
    bare = {name: tensor for name, tensor in tensors.items() if not name.startswith("mtp.")}
    found = load_source(config, DictSource(bare))
    assert found.config.drafter is None and found.weights.mtp == () and "holds none" in found.notes[0]
    with pytest.raises(ModelError, match="no MTP module"):
        require_mtp(found.config)
    silent = replace(config, num_nextn_predict_layers=0, drafter=None, compress_ratios=config.compress_ratios[:4])
    found = load_source(silent, DictSource(tensors))
    assert found.weights.mtp == () and "does not mention" in found.notes[0]
    require_mtp(config)  # the control


@pytest.mark.usefixtures("nothing_read")
def test_half_an_mtp_module_is_an_error():
    error = changed(lambda tensors: tensors.pop("mtp.0.enorm.weight"))
    assert "mtp.0.enorm.weight is missing" in error.found[0]
