"""Loading: the values are those stored, whatever the preparation, the source or the rank."""

from __future__ import annotations

import functools
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors import safe_open

from halma.models.deepseek_v4.checkpoint import (
    Checkpoint,
    LoadOptions,
    load_case,
    load_checkpoint,
    load_source,
)
from halma.models.deepseek_v4.load import default_carrier
from halma.models.deepseek_v4.names import from_transformers, to_transformers, transformers_place
from halma.models.deepseek_v4.presets import tiny_directory
from halma.models.deepseek_v4.sources import DictSource, TransformersSource
from halma.models.deepseek_v4.synthetic import (
    SyntheticSource,
    plain_tensors,
    small_config,
    synthetic_tensors,
    write_checkpoint,
)
from halma.ops.weight import dequantise
from tests.cpu.model.loading import equal, matrices

CASES = Path(__file__).parents[2] / "data" / "cases"


@functools.cache
def tiny() -> Checkpoint:
    return load_checkpoint(tiny_directory())


@functools.cache
def stored() -> dict[str, torch.Tensor]:
    with safe_open(str(tiny_directory() / "model.safetensors"), framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def by_hand(stem: str) -> torch.Tensor:
    """Dequantise bit by bit in numpy float64: nothing shared with the code under test."""
    raw = stored()[f"{stem}.weight"].view(torch.uint8).numpy().astype(np.int64)
    exponents = stored()[f"{stem}.scale"].view(torch.uint8).numpy().astype(np.int64)
    scale = np.exp2(exponents - 127.0)
    if stored()[f"{stem}.weight"].dtype is torch.int8:
        codes = np.empty((raw.shape[0], raw.shape[1] * 2), dtype=np.int64)
        codes[:, 0::2], codes[:, 1::2] = raw % 16, raw // 16
        magnitude = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])[codes % 8]
        return torch.from_numpy(np.where(codes >= 8, -magnitude, magnitude) * np.repeat(scale, 32, axis=1))
    sign, exponent, mantissa = raw // 128, raw // 8 % 16, raw % 8
    magnitude = np.where(exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * np.exp2(exponent - 7.0))
    rows, columns = raw.shape
    spread = np.repeat(np.repeat(scale, 128, axis=0)[:rows], 128, axis=1)[:, :columns]
    return torch.from_numpy(np.where(sign == 1, -magnitude, magnitude) * spread)


ROUNDED = {"wq_a_wkv", "wq_b", "wo_b", "index_wq_b", "gate_up", "down", "shared_gate_up", "shared_down"}
ROUNDED |= {"e_proj", "h_proj"}


# -- the tiny checkpoint -----------------------------------------------------------------------------------


def test_tiny_is_finite_float32_and_has_the_right_shapes():
    weights, config = tiny().weights, tiny().config
    assert tiny().notes == () and config.drafter == "mtp" and len(weights.mtp) == 1 and len(weights.layers) == 4
    for name, tensor in weights.tensors():
        assert torch.isfinite(tensor).all(), name
        assert tensor.dtype is (torch.int64 if name.endswith("tid2eid") else torch.float32), name
    kinds = [(w.attn.compressor is not None, w.attn.indexer is not None) for w in weights.layers]
    assert kinds == [(False, False), (True, True), (True, False), (True, True)]
    assert [w.ffn.tid2eid is not None for w in weights.layers] == [True, False, False, False]
    assert [w.ffn.bias is not None for w in weights.layers] == [False, True, True, True]
    assert weights.mtp[0].block.ffn.bias is not None and weights.mtp[0].block.attn.compressor is None
    shapes = {name: weight.shape for name, weight in matrices(weights).items()}
    assert shapes["wq_a_wkv"] == (256, 256) and shapes["gate_up"] == (16, 256, 256) and shapes["down"] == (16, 256, 128)
    assert shapes["compressor"] == (512, 256) and shapes["wo_a"] == (256, 256) and shapes["head"] == (1024, 256)
    ape = weights.layers[2].attn.compressor
    assert ape is not None and ape.ape.shape == (128, 128) and weights.layers[0].attn.sink.shape == (4,)


def test_tiny_values_equal_a_dequantisation_by_hand():
    attn, ffn = tiny().weights.layers[1].attn, tiny().weights.layers[1].ffn
    prefix = "layers.1.attn"
    pairs = {
        "wq_a_wkv": (attn.wq_a_wkv.data, torch.cat([by_hand(f"{prefix}.wq_a"), by_hand(f"{prefix}.wkv")])),
        "wq_b": (attn.wq_b.data, by_hand(f"{prefix}.wq_b")),
        "wo_a": (attn.wo_a.data, by_hand(f"{prefix}.wo_a")),
        "wo_b": (attn.wo_b.data, by_hand(f"{prefix}.wo_b")),
        "shared_down": (ffn.shared_down.data, by_hand("layers.1.ffn.shared_experts.w2")),
        "h_proj": (tiny().weights.mtp[0].h_proj.data, by_hand("mtp.0.h_proj")),
    }
    for expert in (0, 7, 15):
        experts = f"layers.1.ffn.experts.{expert}"
        up = torch.cat([by_hand(f"{experts}.w1"), by_hand(f"{experts}.w3")])
        pairs[f"gate_up {expert}"] = ffn.gate_up.data[expert], up
        pairs[f"down {expert}"] = ffn.down.data[expert], by_hand(f"{experts}.w2")
    for name, (found, expected) in pairs.items():
        assert expected.std() > 0 and torch.equal(found.double(), expected), name


def test_tiny_plain_tensors_are_the_stored_ones():
    weights, raw = tiny().weights, stored()
    layer, compressor = weights.layers[2], weights.layers[2].attn.compressor
    assert compressor is not None
    pairs = [
        (weights.embed.data, raw["embed.weight"]),
        (weights.hc_head.fn, raw["hc_head_fn"]),
        (weights.norm, raw["norm.weight"]),
        (layer.hc_ffn.scale, raw["layers.2.hc_ffn_scale"]),
        (layer.hc_attn.base, raw["layers.2.hc_attn_base"]),
        (layer.attn.kv_norm, raw["layers.2.attn.kv_norm.weight"]),
        (layer.ffn.bias, raw["layers.2.ffn.gate.bias"]),
        (layer.ffn.gate.data, raw["layers.2.ffn.gate.weight"]),
        (compressor.ape, raw["layers.2.attn.compressor.ape"]),
        (compressor.wkv_wgate.data[128:], raw["layers.2.attn.compressor.wgate.weight"]),
        (weights.mtp[0].enorm, raw["mtp.0.enorm.weight"]),
        (weights.mtp[0].hc_head.base, raw["mtp.0.hc_head_base"]),
    ]
    for position, (found, expected) in enumerate(pairs):
        assert found is not None and torch.equal(found, expected.float()), position
    assert torch.equal(weights.layers[0].ffn.tid2eid, raw["layers.0.ffn.gate.tid2eid"])


# -- preparation -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dequantised", [True, False])
def test_shipping_rounds_the_input_of_just_the_official_linears(dequantised: bool):
    options = LoadOptions(arithmetic="shipping", dequantise=dequantised)
    found = matrices(load_checkpoint(tiny_directory(), options).weights)
    assert {name for name, weight in found.items() if weight.activation == "fp8"} == ROUNDED
    assert all(weight.activation is None for weight in matrices(tiny().weights).values())


def test_packed_weights_keep_their_bits_and_their_values():
    packed = load_checkpoint(tiny_directory(), LoadOptions(dequantise=False))
    raw = stored()
    assert packed.notes == ()
    for name, weight in matrices(packed.weights).items():
        plain = matrices(tiny().weights)[name]
        assert torch.equal(dequantise(weight, torch.float32).data, plain.data), name
    attn, ffn = packed.weights.layers[1].attn, packed.weights.layers[1].ffn
    assert attn.wq_a_wkv.format == "fp8_block128" and ffn.gate_up.format == "fp4_block32"
    assert attn.wq_a_wkv.scale is not None and ffn.down.scale is not None
    kept = torch.cat(
        [raw["layers.1.attn.wq_a.scale"].view(torch.uint8), raw["layers.1.attn.wkv.scale"].view(torch.uint8)]
    )
    assert torch.equal(attn.wq_a_wkv.scale.view(torch.uint8), kept)
    assert torch.equal(ffn.down.data[3], raw["layers.1.ffn.experts.3.w2.weight"])
    expected = raw["layers.1.ffn.experts.3.w2.scale"].view(torch.uint8)
    assert torch.equal(ffn.down.scale[3].view(torch.uint8), expected)


def test_carriers():
    double = load_checkpoint(tiny_directory(), LoadOptions(carrier=torch.float64)).weights
    for (name, a), (_, b) in zip(double.tensors(), tiny().weights.tensors(), strict=True):
        assert a.dtype is (torch.int64 if name.endswith("tid2eid") else torch.float64)
        assert torch.equal(a, b.to(a.dtype)), name
    half = load_checkpoint(tiny_directory(), LoadOptions(carrier=torch.bfloat16)).weights
    # Not a bit is lost: four significant bits and a power of two fit into bfloat16.
    for name, weight in matrices(half).items():
        assert weight.data.dtype is torch.bfloat16
        assert torch.equal(weight.data.float(), matrices(tiny().weights)[name].data), name
    assert half.layers[0].attn_norm.dtype is half.layers[0].hc_attn.fn.dtype is torch.float32


def test_scales_may_be_called_bytes():
    config, tensors = small_config(), synthetic_tensors(small_config())
    bytes_ = {n: t.view(torch.uint8) if t.dtype is torch.float8_e8m0fnu else t for n, t in tensors.items()}
    for options in (LoadOptions(), LoadOptions(dequantise=False)):
        a = load_source(config, DictSource(tensors), options).weights
        b = load_source(config, DictSource(bytes_), options).weights
        for (name, x), (_, y) in zip(a.tensors(), b.tensors(), strict=True):
            assert x.dtype == y.dtype and torch.equal(x.view(torch.uint8), y.view(torch.uint8)), name


def test_weights_own_their_memory():
    """Nothing that was loaded may change with its source (a mapped file, the caller's tensors)."""
    config, tensors = small_config(), synthetic_tensors(small_config(), plain=True)
    weights = load_source(config, DictSource(tensors)).weights
    before = {name: tensor.clone() for name, tensor in weights.tensors()}
    for tensor in tensors.values():
        tensor.fill_(3)
    assert all(torch.equal(before[name], tensor) for name, tensor in weights.tensors())


@pytest.mark.parametrize("experts", ["fp8", "plain"])
def test_base_experts_and_plain_checkpoints(experts: str):
    config = small_config(expert_dtype=experts, quantised=experts == "fp8", moe_intermediate_size=128)
    tensors = synthetic_tensors(config)
    packed = load_source(config, DictSource(tensors), LoadOptions(dequantise=False, arithmetic="shipping"))
    ffn = packed.weights.layers[1].ffn
    if experts == "fp8":
        assert ffn.gate_up.format == ffn.down.format == "fp8_block128" and ffn.down.activation == "fp8"
    else:  # the official code rounds inputs of quantised linears only
        assert all(weight.activation is None for weight in matrices(packed.weights).values())
    exact = load_source(config, DictSource(tensors)).weights
    w3 = plain_tensors(tensors)["layers.1.ffn.experts.5.w3.weight"]
    assert torch.equal(exact.layers[1].ffn.gate_up.data[5, 128:], w3)


def test_blocks_that_a_fusion_cuts_become_plain_and_are_noted():
    config = small_config(moe_intermediate_size=96, q_lora_rank=96)
    tensors = synthetic_tensors(config)
    packed = load_source(config, DictSource(tensors), LoadOptions(dequantise=False))
    layer = packed.weights.layers[0]
    assert layer.attn.wq_a_wkv.format == "plain" and layer.ffn.shared_gate_up.format == "plain"
    assert layer.attn.wq_b.format == "fp8_block128" and layer.ffn.gate_up.format == "fp4_block32"
    assert len(packed.notes) == 1 and "blocks of scales" in packed.notes[0]
    exact = load_source(config, DictSource(tensors)).weights.layers[0]
    assert torch.equal(layer.attn.wq_a_wkv.data, exact.attn.wq_a_wkv.data)
    assert torch.equal(layer.ffn.shared_gate_up.data, exact.ffn.shared_gate_up.data)


# -- sources -----------------------------------------------------------------------------------------------


def test_shards_and_single_file_load_alike_and_report_progress(tmp_path: Path):
    config, tensors = small_config(), synthetic_tensors(small_config(), seed=3)
    seen: list[tuple[int, int, str]] = []
    write_checkpoint(tmp_path / "one", config, tensors)
    one = load_checkpoint(tmp_path / "one", progress=lambda *step: seen.append(step))
    three = load_checkpoint(write_checkpoint(tmp_path / "three", config, tensors, shards=3))
    assert len(list((tmp_path / "three").glob("*.safetensors"))) == 3
    assert equal(one.weights, three.weights) and one.config == config
    done = [step[0] for step in seen]
    assert done == sorted(done) and done[0] > 0 and seen[-1][0] == seen[-1][1]
    assert seen[-1][1] == sum(tensor.nbytes for tensor in tensors.values())
    assert {step[2] for step in seen} == set(tensors)


def test_synthetic_weights_need_no_files():
    config = small_config()
    a = load_source(config, SyntheticSource(config, 1)).weights
    b = load_source(config, DictSource(synthetic_tensors(config, 1))).weights
    assert equal(a, b) and not equal(a, load_source(config, SyntheticSource(config, 2)).weights)


def test_the_drafter_can_be_left_out():
    config = small_config()
    found = load_source(config, SyntheticSource(config), LoadOptions(drafter=False))
    assert found.weights.mtp == () and found.config.drafter == "mtp" and found.notes == ()


def test_unknown_tensors_are_ignored_with_a_note():
    config, tensors = small_config(), synthetic_tensors(small_config())
    tensors["layers.0.attn.rotary.inv_freq"] = torch.ones(3)
    found = load_source(config, DictSource(tensors))
    assert len(found.notes) == 1 and "layers.0.attn.rotary.inv_freq" in found.notes[0] and "1 tensors" in found.notes[0]


@pytest.mark.parametrize("case", ["all_layers", "hash_only"])
def test_golden_cases_load_by_transformers_names(case: str):
    found = load_case(CASES / f"{case}.safetensors")
    assert found.notes == () and found.config.num_mtp == (1 if case == "all_layers" else 0)
    layer = found.weights.layers[1]
    with safe_open(str(CASES / f"{case}.safetensors"), framework="pt") as file:

        def raw(name: str) -> torch.Tensor:
            return file.get_tensor(f"w.model.layers.1.{name}")

        assert torch.equal(layer.ffn.gate_up.data, raw("mlp.experts.gate_up_proj"))
        assert torch.equal(layer.ffn.down.data, raw("mlp.experts.down_proj"))
        fused = torch.cat([raw("self_attn.q_a_proj.weight"), raw("self_attn.kv_proj.weight")])
        assert torch.equal(layer.attn.wq_a_wkv.data, fused)
        assert torch.equal(layer.attn.sink, raw("self_attn.sinks"))
        shared = [raw(f"mlp.shared_experts.{part}_proj.weight") for part in ("gate", "up")]
        assert torch.equal(layer.ffn.shared_gate_up.data, torch.cat(shared))
        if found.weights.mtp:
            up = file.get_tensor("w.mtp.0.block.mlp.experts.gate_up_proj")
            assert torch.equal(found.weights.mtp[0].block.ffn.gate_up.data, up)
            assert torch.equal(found.weights.mtp[0].hc_head.fn, file.get_tensor("w.mtp.0.hc_head.hc_fn"))


def test_names_translate_both_ways():
    config = small_config()
    plain = synthetic_tensors(config, plain=True)
    theirs = to_transformers(plain, mtp=True)
    back = from_transformers(theirs)
    assert back.keys() == plain.keys() and all(torch.equal(back[name], plain[name]) for name in plain)
    a = load_source(config, TransformersSource(DictSource(theirs))).weights
    assert equal(a, load_source(config, DictSource(plain)).weights)
    assert not any(name.startswith("mtp") for name in to_transformers(plain))
    assert transformers_place("layers.0.attn.wq_b.scale") is None and transformers_place("nonsense") is None
    with pytest.raises(ValueError, match=r"embed\.scale"):
        to_transformers({"embed.scale": torch.ones(1)})


@pytest.mark.oracle
def test_transformers_takes_our_state_dict_whole():
    transformers = pytest.importorskip("transformers", "5.24")
    from halma.models.deepseek_v4.config_names import transformers_fields

    config = small_config()
    theirs = transformers.DeepseekV4Config(**transformers_fields(config))
    with torch.device("meta"):
        model = transformers.DeepseekV4ForCausalLM(theirs)
    state = to_transformers(synthetic_tensors(config, plain=True))
    wanted = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    assert wanted == {name: tuple(tensor.shape) for name, tensor in state.items()}


@pytest.mark.parametrize(
    ("device", "arithmetic", "expected"),
    [
        ("cpu", "exact", torch.float32),
        ("cpu", "shipping", torch.float32),
        ("meta", "exact", torch.float32),  # any device but the CPU
        ("meta", "shipping", torch.bfloat16),
    ],
)
@pytest.mark.invariant("M1")
def test_where_nothing_may_be_rounded_activations_are_float32(device, arithmetic, expected) -> None:
    backend = SimpleNamespace(device=SimpleNamespace(torch_device=torch.device(device)))
    assert default_carrier(backend, arithmetic) is expected
