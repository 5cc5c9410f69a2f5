"""Parts and sizes: what a rank holds, what loading takes, and checkpoints made of nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from halma.models.deepseek_v4.checkpoint import LoadOptions, load_checkpoint, load_source, weight_sizes
from halma.models.deepseek_v4.presets import tiny_directory, v4_flash, v4_pro
from halma.models.deepseek_v4.synthetic import (
    SyntheticSource,
    plain_tensors,
    small_config,
    synthetic_tensors,
    write_checkpoint,
)
from halma.ops.weight import dequantise
from tests.cpu.model.loading import matrices

# -- tensor parallel ---------------------------------------------------------------------------------------


def rows(*parts: torch.Tensor) -> torch.Tensor:
    return torch.cat(parts, dim=-2)


@pytest.mark.parametrize("dequantised", [True, False])
def test_ranks_hold_slices_that_make_up_the_whole(dequantised: bool):
    # Intermediate width 320 / 2 = 160: blocks of 32 stay whole, blocks of 128 (shared expert) are cut.
    config = small_config(vocab_size=200, moe_intermediate_size=320, o_lora_rank=128)
    source = SyntheticSource(config)
    whole = load_source(config, source).weights
    parts = [load_source(config, source, LoadOptions(dequantise=dequantised, rank=r, world=2)) for r in range(2)]

    def plain(name: str) -> list[torch.Tensor]:
        return [dequantise(matrices(part.weights)[name], torch.float32).data for part in parts]

    for name, weight in matrices(whole).items():
        a, b = plain(name)
        if name in ("wq_b", "wo_a", "embed", "head"):
            assert torch.equal(rows(a, b), weight.data), name
        elif name in ("wo_b", "down", "shared_down"):
            assert torch.equal(torch.cat([a, b], dim=-1), weight.data), name
        elif name in ("gate_up", "shared_gate_up"):
            (gate_a, up_a), (gate_b, up_b) = a.chunk(2, dim=-2), b.chunk(2, dim=-2)
            assert torch.equal(rows(gate_a, gate_b, up_a, up_b), weight.data), name
        else:
            assert torch.equal(a, weight.data) and torch.equal(b, weight.data), name
    assert torch.equal(torch.cat([part.weights.layers[1].attn.sink for part in parts]), whole.layers[1].attn.sink)
    formats = {name: weight.format for name, weight in matrices(parts[0].weights).items()}
    assert formats["gate_up"] == formats["down"] == ("plain" if dequantised else "fp4_block32")
    assert formats["wq_b"] == formats["wo_b"] == ("plain" if dequantised else "fp8_block128")
    assert formats["shared_down"] == "plain"  # its blocks of 128 are cut


def test_a_rank_reads_only_its_part(tmp_path: Path):
    config = small_config(vocab_size=200)
    directory = write_checkpoint(tmp_path, config, synthetic_tensors(config))
    read: dict[int, int] = {}
    for world in (1, 2):
        done: list[int] = []
        options = LoadOptions(world=world, dequantise=False)
        loaded = load_checkpoint(directory, options, progress=lambda d, t, n, done=done: done.append(d))
        sizes = weight_sizes(config, options)
        assert loaded.weights.nbytes == sizes.weights
        assert done[-1] == sizes.read
        read[world] = done[-1]
    assert read[2] < 0.9 * read[1]  # most of so small a model is on every rank


# -- sizes -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [LoadOptions(), LoadOptions(dequantise=False), LoadOptions(torch.float64)])
def test_planned_bytes_are_the_loaded_bytes(options: LoadOptions):
    found = load_checkpoint(tiny_directory(), options)
    assert weight_sizes(found.config, options).weights == found.weights.nbytes


def test_published_sizes_come_out_of_the_configuration():
    """159.61 GB for V4-Flash and 805.3 GiB for V4-Pro are the sizes of the published files."""
    flash, pro = (weight_sizes(config, LoadOptions(dequantise=False)).read for config in (v4_flash(), v4_pro()))
    assert round(flash / 1e9, 2) == 159.61 and round(pro / 2**30, 1) == 805.3


# -- synthetic checkpoints ---------------------------------------------------------------------------------


def test_synthetic_weights_are_in_official_formats_and_not_degenerate():
    config = small_config()
    tensors = synthetic_tensors(config)
    assert tensors["layers.0.attn.wq_b.weight"].dtype is torch.float8_e4m3fn
    assert tensors["layers.0.ffn.experts.0.w1.weight"].dtype is torch.int8
    assert tensors["layers.0.attn.attn_sink"].dtype is torch.float32
    table = tensors["layers.0.ffn.gate.tid2eid"]
    assert all(len(set(row)) == config.num_experts_per_tok for row in table.tolist()) and table.unique().numel() == 8
    for name, tensor in plain_tensors(tensors).items():
        assert torch.isfinite(tensor).all(), name
        assert tensor.numel() == 1 or tensor.double().std() > 0.01, name
    for stem, columns in (("layers.1.attn.wq_b", 128), ("layers.1.ffn.experts.2.w2", 64), ("head", 128)):
        spread = float(plain_tensors(tensors)[f"{stem}.weight"].std()) * columns**0.5
        assert 0.4 < spread < 2.5, stem
