"""The configuration: both vocabularies, presets, and a refusal for every field out of range."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from halma.hal.errors import ModelError
from halma.models.deepseek_v4.config import LayerKind, RopeScaling, V4Config
from halma.models.deepseek_v4.config_names import transformers_fields
from halma.models.deepseek_v4.presets import PRESETS, model_directory, preset, tiny_directory, v4_flash, v4_pro
from halma.models.deepseek_v4.rope import rope_frequencies, rope_inv_freq
from halma.models.deepseek_v4.synthetic import small_config

CASES = Path(__file__).parents[2] / "data" / "cases"


def official() -> dict[str, Any]:
    return json.loads((tiny_directory() / "config.json").read_text())


# -- presets ---------------------------------------------------------------------------------------------


def test_flash_and_pro_have_their_published_layers():
    flash, pro = v4_flash(), v4_pro()
    count = {name: sum(kind.name == name for kind in flash.layers) for name in ("SWA", "CSA", "HCA")}
    assert count == {"SWA": 2, "CSA": 21, "HCA": 20} and len(flash.layers) == flash.num_hidden_layers == 43
    count = {name: sum(kind.name == name for kind in pro.layers) for name in ("SWA", "CSA", "HCA")}
    assert count == {"SWA": 0, "CSA": 30, "HCA": 31} and len(pro.layers) == pro.num_hidden_layers == 61
    for config in (flash, pro):
        # The draft block is a window layer in both: taking layer 1's ratio is wrong on Pro (antirez/ds4#411).
        assert config.mtp_layers == (LayerKind(0),) and config.num_mtp == 1 and config.drafter == "mtp"
        assert config.nope_head_dim == 448 and config.num_attention_heads // config.o_groups * config.head_dim == 4096
    assert (flash.index_topk, pro.index_topk) == (512, 1024)


def test_kinds_follow_the_ratio():
    assert [LayerKind(ratio).name for ratio in (0, 4, 16, 128)] == ["SWA", "CSA", "HCA", "HCA"]
    assert [LayerKind(ratio).rope for ratio in (0, 4, 128)] == ["main", "compress", "compress"]
    assert [LayerKind(ratio).indexed for ratio in (0, 4, 128)] == [False, True, False]
    assert [LayerKind(ratio).overlap for ratio in (0, 4, 128)] == [False, True, False]


@pytest.mark.parametrize("name", [*PRESETS, "v4-flash"])
def test_presets_survive_being_written_and_read(name: str):
    config = preset(name)
    assert V4Config.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_unknown_names_get_a_suggestion(tmp_path: Path):
    with pytest.raises(ModelError, match='did you mean "V4-Flash"') as error:
        preset("v4-flsh")
    assert error.value.asked == ("--model v4-flsh",) and error.value.found and error.value.do
    with pytest.raises(ModelError, match="weights do not come with halma"):
        model_directory("V4-Pro")
    with pytest.raises(ModelError, match="no model called"):
        model_directory(str(tmp_path / "absent"))
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(ModelError, match="a model is a directory"):
        model_directory(str(tmp_path / "model.safetensors"))
    assert model_directory(str(tmp_path)) == tmp_path and model_directory("tiny-v4") == tiny_directory()


# -- transformers' names ---------------------------------------------------------------------------------


@pytest.mark.parametrize("case", ["all_layers", "hash_only"])
def test_both_vocabularies_of_the_golden_cases_agree(case: str):
    with safe_open(str(CASES / f"{case}.safetensors"), framework="pt") as file:
        metadata = file.metadata()
    ours = V4Config.from_dict(json.loads(metadata["official_config"]))
    theirs = V4Config.from_dict(json.loads(metadata["config"]))
    modules = ours.num_nextn_predict_layers  # transformers writes its default of 1 whether or not there is one
    ratios = theirs.compress_ratios[: theirs.num_hidden_layers + modules]
    drafter = "mtp" if modules else None
    assert replace(theirs, num_nextn_predict_layers=modules, compress_ratios=ratios, drafter=drafter) == ours


def test_a_configuration_survives_transformers_names():
    config = small_config(num_nextn_predict_layers=0, drafter=None, compress_ratios=(0, 4, 16, 4))
    config = replace(config, quantised=False, expert_dtype="plain")
    assert V4Config.from_dict(json.loads(json.dumps(transformers_fields(config)))) == config


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"compress_rates": {"compressed_sparse_attention": 8, "heavily_compressed_attention": 16}}, "must be 4"),
        ({"layer_types": ["linear_attention"] * 4}, "linear_attention"),
        ({"mlp_layer_types": ["moe", "hash_moe", "moe", "moe"]}, "hash_moe layers first"),
        ({"rope_parameters": {"main": {"rope_theta": 1e4}}}, "'compress' is missing"),
        ({"rope_parameters": None}, "NoneType"),
    ],
)
def test_transformers_fields_that_mean_nothing_here(change: dict[str, Any], words: str):
    raw = transformers_fields(small_config()) | change
    with pytest.raises(ModelError, match="transformers' names") as error:
        V4Config.from_dict(raw)
    assert any(words in line for line in error.value.found)


def test_transformers_cannot_say_two_heavy_ratios():
    with pytest.raises(ModelError, match="one HCA ratio"):
        transformers_fields(small_config(compress_ratios=(0, 4, 16, 32, 0)))


# -- refusals --------------------------------------------------------------------------------------------

OUT_OF_RANGE: list[tuple[str, Any, str]] = [
    ("vocab_size", 0, "1 to"),
    ("hidden_size", -1, "1 to"),
    ("hidden_size", 257, "multiples of 32"),
    ("moe_intermediate_size", 0, "1 to"),
    ("num_hidden_layers", 0, "1 to"),
    ("num_hidden_layers", 7, "must have 8"),
    ("num_attention_heads", 3, "must divide num_attention_heads"),
    ("head_dim", 0, "2 to"),
    ("qk_rope_head_dim", 63, "even"),
    ("qk_rope_head_dim", 130, "head_dim = 128"),
    ("q_lora_rank", 0, "1 to"),
    ("o_groups", 3, "must divide"),
    ("o_lora_rank", 0, "1 to"),
    ("n_routed_experts", 0, "1 to"),
    ("num_experts_per_tok", 17, "n_routed_experts = 16"),
    ("num_hash_layers", 5, "num_hidden_layers = 4"),
    ("num_hash_layers", -1, "0 to"),
    ("routed_scaling_factor", 0, "above 0"),
    ("swiglu_limit", -1.0, "above 0"),
    ("sliding_window", 0, "1 to"),
    ("compress_ratios", [0, 4, 128, 4, 0, 0], "has 6 entries; must have 5"),
    ("compress_ratios", [0, 4, 1, 4, 0], "[1]"),
    ("compress_ratios", [0, 4, -4, 4, 0], "[-4]"),
    ("compress_ratios", [0, 4, 128, 4, 128], "MTP"),
    ("index_n_heads", 0, "1 to"),
    ("index_head_dim", 96, "power of two"),
    ("index_head_dim", 32, "index_head_dim = 32"),
    ("index_topk", 0, "1 to"),
    ("hc_mult", 0, "1 to"),
    ("hc_sinkhorn_iters", 0, "1 to"),
    ("hc_eps", 0.0, "above 0"),
    ("rms_norm_eps", float("nan"), "above 0"),
    ("rope_theta", 1, "above 1"),
    ("compress_rope_theta", float("inf"), "above 1"),
    ("max_position_embeddings", 0, "1 to"),
    ("num_nextn_predict_layers", -1, "0 to"),
    ("bos_token_id", 1024, "0 to 1023"),
    ("eos_token_id", 4096, "0 to 1023"),
    ("expert_dtype", "int4", "fp4, fp8, plain"),
]


@pytest.mark.parametrize(("field", "value", "words"), OUT_OF_RANGE)
def test_a_field_out_of_range_is_named_with_value_and_range(field: str, value: Any, words: str):
    with pytest.raises(ModelError, match="out of range") as error:
        V4Config.from_dict(official() | {field: value}, "here")
    assert any(field in line and words in line for line in error.value.found), error.value.found
    assert error.value.asked == ("here",) and error.value.do


def test_the_unchanged_configuration_is_in_range():
    assert V4Config.from_dict(official()).num_hidden_layers == 4


def test_every_problem_is_told_at_once():
    with pytest.raises(ModelError) as error:
        V4Config.from_dict(official() | {"hc_mult": 0, "index_topk": -3})
    assert len(error.value.found) == 2


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"factor": 0.5}, "rope_scaling.factor"),
        ({"original_max_position_embeddings": 0}, "rope_scaling.original_max_position_embeddings"),
        ({"beta_slow": 64}, "rope_scaling.beta_slow"),
    ],
)
def test_rope_scaling_out_of_range(change: dict[str, Any], words: str):
    raw = official()
    raw["rope_scaling"] |= change
    with pytest.raises(ModelError, match="out of range") as error:
        V4Config.from_dict(raw)
    assert any(words in line for line in error.value.found)


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("hidden_size", 256.5, "whole number"),
        ("hidden_size", True, "whole number"),
        ("rope_theta", "10000", "must be a number"),
        ("compress_ratios", "0,4", "list of whole numbers"),
        ("compress_ratios", [0, 4.0], "list of whole numbers"),
        ("rope_scaling", [], "must be an object"),
        ("rope_scaling", {"type": "linear", "factor": 2, "original_max_position_embeddings": 9}, "yarn"),
        ("rope_scaling", {"factor": 16}, "original_max_position_embeddings is missing"),
        ("rope_scaling", {"factor": "16", "original_max_position_embeddings": 9}, "rope_scaling.factor = '16'"),
    ],
)
def test_a_value_of_the_wrong_type(field: str, value: Any, words: str):
    with pytest.raises(ModelError, match="cannot be read") as error:
        V4Config.from_dict(official() | {field: value})
    assert any(words in line for line in error.value.found), error.value.found


@pytest.mark.parametrize("field", ["hidden_size", "compress_ratios", "rope_scaling", "hc_mult"])
def test_a_missing_field(field: str):
    raw = official()
    del raw[field]
    with pytest.raises(ModelError, match=f"{field} is missing"):
        V4Config.from_dict(raw)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_key_value_heads", 8),
        ("n_shared_experts", 2),
        ("n_shared_experts", True),
        ("scoring_func", "sigmoid"),
        ("norm_topk_prob", False),
        ("tie_word_embeddings", True),
        ("hidden_act", "gelu"),
    ],
)
def test_what_v4_does_not_have_is_refused(field: str, value: Any):
    with pytest.raises(ModelError, match="does not have") as error:
        V4Config.from_dict(official() | {field: value})
    assert any(field in line and repr(value) in line for line in error.value.found)


def test_another_quantisation_is_refused():
    raw = official()
    raw["quantization_config"] |= {"weight_block_size": [32, 32]}
    with pytest.raises(ModelError, match="weight_block_size"):
        V4Config.from_dict(raw)
    with pytest.raises(ModelError, match="quantization_config = 'fp8'"):
        V4Config.from_dict(official() | {"quantization_config": "fp8"})


def test_v41_is_refused_by_its_own_message():
    with pytest.raises(ModelError, match="different architecture"):
        V4Config.from_dict(official() | {"model_type": "deepseek_v41"})


@pytest.mark.parametrize("found", ["deepseek_v3", "deepseek_v4x", "DEEPSEEK_V4", 4, None])
def test_another_model_is_refused(found: Any):
    with pytest.raises(ModelError, match="not a DeepSeek-V4 model"):
        V4Config.from_dict(official() | {"model_type": found})


def test_dspark_is_told_by_its_keys_and_is_no_error():
    raw = official() | {"dspark_block_size": 5, "compress_ratios": [0, 4, 128, 4, 0, 0, 0]}
    config = V4Config.from_dict(raw)
    assert config.drafter == "dspark" and config.num_mtp == 0 and config.mtp_layers == ()
    assert config.compress_ratios == (0, 4, 128, 4)
    assert V4Config.from_dict(config.to_dict()) == config


def test_base_checkpoints_have_fp8_experts():
    raw = official()
    del raw["expert_dtype"]
    assert V4Config.from_dict(raw).expert_dtype == "fp8"
    del raw["quantization_config"]
    plain = V4Config.from_dict(raw)
    assert plain.expert_dtype == "plain" and not plain.quantised


def test_files(tmp_path: Path):
    path = tmp_path / "config.json"
    with pytest.raises(ModelError, match="missing"):
        V4Config.from_file(tmp_path)
    for text, words in (("{", "not valid JSON"), ("[1]", "not a JSON object"), ("[" * 100_000, "not valid JSON")):
        path.write_text(text)
        with pytest.raises(ModelError, match=words):
            V4Config.from_file(tmp_path)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ModelError, match="cannot be read"):
        V4Config.from_file(path)
    path.write_text(json.dumps(official()))
    assert V4Config.from_file(tmp_path) == V4Config.from_file(path) == preset("tiny-v4")


# -- rope ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", ["all_layers", "hash_only", "tiny_v4_exact", "tiny_v4_quant"])
@pytest.mark.parametrize("kind", ["main", "compress"])
def test_rope_frequencies_are_those_of_the_golden_cases_to_the_bit(case: str, kind: str):
    with safe_open(str(CASES / f"{case}.safetensors"), framework="pt") as file:
        expected = file.get_tensor(f"aux.rope_inv_freq.{kind}")
        metadata = file.metadata()
    config = V4Config.from_dict(json.loads(metadata.get("official_config") or metadata["config"]))
    found = rope_inv_freq(config, kind)
    assert found.dtype is torch.float64 and torch.equal(found, expected.double())


def test_yarn_leaves_fast_pairs_and_stretches_slow_ones():
    config = v4_flash()
    unscaled = rope_inv_freq(replace(config, rope_scaling=RopeScaling(1.0, 65536)), "compress")
    found = rope_inv_freq(config, "compress")
    assert torch.equal(found[:10], unscaled[:10]) and torch.allclose(found[-4:] * 16, unscaled[-4:], rtol=1e-6)
    assert (found[1:] < found[:-1]).all()
    theta = torch.arange(32, dtype=torch.float64) * -2 / 64
    assert torch.allclose(rope_inv_freq(config, "main"), 10000.0**theta, rtol=1e-6)


def test_rope_tables_are_those_the_layers_use():
    assert list(rope_frequencies(small_config())) == ["main", "compress"]
    pro = replace(v4_pro(), num_nextn_predict_layers=0, drafter=None, compress_ratios=v4_pro().compress_ratios[:-1])
    assert list(rope_frequencies(pro)) == ["compress"]
    assert rope_frequencies(pro, dtype=torch.bfloat16)["compress"].dtype is torch.float32
    assert rope_frequencies(pro, dtype=torch.float64)["compress"].dtype is torch.float64
