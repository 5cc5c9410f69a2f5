"""Ranks that do not divide a model, and models that memory does not hold: refused before anything is read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from halma.hal.errors import ModelError
from halma.models.deepseek_v4.checkpoint import LoadOptions, load_checkpoint, load_source, weight_sizes
from halma.models.deepseek_v4.preparation import worlds
from halma.models.deepseek_v4.presets import tiny_directory, tiny_v4, v4_flash, v4_pro
from halma.models.deepseek_v4.sizing import MemoryLimit, check_fit, host_limits
from halma.models.deepseek_v4.sources import DictSource
from halma.models.deepseek_v4.synthetic import SyntheticSource, small_config, synthetic_tensors
from halma.models.deepseek_v4.tensor_files import INDEX
from tests.cpu.model.loading import refused


def test_options_out_of_range():
    with pytest.raises(ModelError) as error:
        LoadOptions(torch.float16, "fast", rank=2, world=2)
    assert len(error.value.found) == 3


def test_a_world_that_does_not_divide_the_model():
    with pytest.raises(ModelError, match="cannot be divided") as error:
        weight_sizes(small_config(), LoadOptions(world=4))
    assert error.value.found == ("o_groups = 2, which 4 does not divide", "vocab_size = 199, which 4 does not divide")
    assert error.value.do == ("numbers of ranks that divide all of them: 1",)
    assert weight_sizes(small_config(vocab_size=200), LoadOptions(world=2)).weights > 0


@pytest.mark.usefixtures("nothing_read")
def test_what_cannot_fit_is_refused_from_index_and_configuration_alone(tmp_path: Path):
    """No shard is there at all: the sum must come before the files are looked for."""
    (tmp_path / "config.json").write_text(json.dumps(v4_flash().to_dict()))
    index = {
        "metadata": {"total_size": 159610422088},
        "weight_map": {"embed.weight": "model-00001-of-00046.safetensors"},
    }
    (tmp_path / INDEX).write_text(json.dumps(index))
    options = LoadOptions(torch.bfloat16, dequantise=False)
    limits = [MemoryLimit("device memory", 141 * 10**9), MemoryLimit("available memory", 10**12)]
    error = refused(tmp_path, options=options, limits=limits, state_bytes=4 * 10**9)
    assert error.what == "the model does not fit into memory" and "159.61 GB" in error.asked[0]
    assert "164.67 GB" in error.found[0] and "weights 159.61 GB" in error.found[0] and "state 4.00 GB" in error.found[0]
    assert error.found[1].startswith("device memory: 141.00 GB") and len(error.found) == 2
    enough = [MemoryLimit("device memory", 165 * 10**9)]
    assert "files are missing" in refused(tmp_path, options=options, limits=enough, state_bytes=4 * 10**9).what


@pytest.mark.usefixtures("nothing_read")
def test_state_counts_and_the_headers_have_the_last_word():
    config = small_config()
    sizes = weight_sizes(config)
    room = [MemoryLimit("cgroup limit", sizes.weights + sizes.buffer + 100)]
    with pytest.raises(ModelError, match="cgroup limit"):
        load_source(config, SyntheticSource(config), limits=room, state_bytes=101)
    # The configuration promises fp4, the file holds float32.
    tensors = synthetic_tensors(config, plain=True)
    packed = weight_sizes(config, LoadOptions(dequantise=False))
    room = [MemoryLimit("cgroup limit", packed.weights + packed.buffer)]
    with pytest.raises(ModelError, match="does not fit"):
        load_source(config, DictSource(tensors), LoadOptions(dequantise=False), limits=room)


def test_a_model_that_just_fits_is_loaded():
    sizes = weight_sizes(small_config())
    room = [MemoryLimit("cgroup limit", sizes.weights + sizes.buffer + 100)]
    found = load_checkpoint(
        tiny_directory(), limits=[MemoryLimit("available memory", 10**9)], state_bytes=lambda config: config.vocab_size
    )
    assert found.weights.nbytes < 10**9
    assert load_source(small_config(), SyntheticSource(small_config()), limits=room, state_bytes=100).notes == ()


def test_limits_of_this_host_are_plausible():
    limits = host_limits()
    assert limits and all(0 < limit.free < 1 << 60 for limit in limits)


def test_limits_are_read_from_both_cgroup_versions(tmp_path: Path):
    def put(path: str, text: str) -> None:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)

    assert host_limits(tmp_path) == []
    put("proc/meminfo", "MemTotal:  64 kB\nMemAvailable:  32 kB\n")
    put("proc/self/cgroup", "0::/a/b\n")
    put("sys/fs/cgroup/memory.max", "max\n")
    put("sys/fs/cgroup/a/memory.max", "9000\n")  # the outer group is the tighter one
    put("sys/fs/cgroup/a/memory.current", "5000\n")
    put("sys/fs/cgroup/a/memory.stat", "anon 4000\ninactive_file 500\n")
    put("sys/fs/cgroup/a/b/memory.max", "20000\n")
    put("sys/fs/cgroup/a/b/memory.current", "5000\n")
    assert host_limits(tmp_path) == [MemoryLimit("available memory", 32768), MemoryLimit("cgroup limit", 4500)]
    put("proc/self/cgroup", "3:cpu,memory:/elsewhere\n")
    put("sys/fs/cgroup/memory/memory.limit_in_bytes", "7000")
    put("sys/fs/cgroup/memory/memory.usage_in_bytes", "1000")
    assert host_limits(tmp_path)[1] == MemoryLimit("cgroup limit", 6000)
    put("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712")
    assert len(host_limits(tmp_path)) == 1


def test_only_the_limits_that_are_too_small_are_named():
    limits = [MemoryLimit("a", 10), MemoryLimit("b", 100)]
    check_fit({"weights": 10}, limits, asked="x")
    with pytest.raises(ModelError) as error:
        check_fit({"weights": 10, "state": 1}, limits, asked="x")
    assert [line for line in error.value.found if line.startswith(("a:", "b:"))] == ["a: 10 bytes"]


def test_the_numbers_of_ranks_of_known_models():
    assert worlds(v4_flash()) == worlds(small_config(vocab_size=200, num_attention_heads=8, o_groups=8)) == [1, 2, 4, 8]
    assert worlds(v4_pro()) == [1, 2, 4, 8, 16] and worlds(tiny_v4()) == [1, 2] and worlds(small_config()) == [1]
