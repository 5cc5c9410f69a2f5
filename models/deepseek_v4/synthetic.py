"""Random checkpoints of any configuration, in the published names and formats, from (seed, tensor name) alone.

Made for tests and for timing at real sizes, so values are cheap (fp8 and fp4 are random bytes under random
scales) and every piece of the mathematics matters: sinks, biases, position biases, hyper-connections and
expert tables are none of them constant, as a default initialisation would leave them.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from halma.models.deepseek_v4.config import RopeScaling, V4Config
from halma.models.deepseek_v4.layout import EXPERT, LINEAR, MatrixSpec, assemble
from halma.models.deepseek_v4.sources import Index
from halma.models.deepseek_v4.tensor_files import INDEX, SINGLE, Entry
from halma.ops.weight import E2M1_VALUES, FP4_BLOCK32, FP8_BLOCK128, PLAIN, Weight, dequantise

_E4M3_RMS = 102.0
"""Root mean square of a uniformly random e4m3 byte that is no NaN."""
_E2M1_RMS = math.sqrt(sum(value * value for value in E2M1_VALUES) / len(E2M1_VALUES))
_E8M0_ONE = 127


def small_config(**changes: Any) -> V4Config:
    """A configuration small enough for a test, with every kind of layer, router and one MTP module.

    Args:
        changes: fields to replace. ``quantised=False, expert_dtype="plain"`` gives a plain checkpoint.
    """
    base = V4Config(
        vocab_size=199,
        hidden_size=128,
        moe_intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        head_dim=64,
        qk_rope_head_dim=16,
        q_lora_rank=128,
        o_groups=2,
        o_lora_rank=64,
        n_routed_experts=8,
        num_experts_per_tok=3,
        num_hash_layers=1,
        routed_scaling_factor=1.5,
        swiglu_limit=2.0,
        sliding_window=16,
        compress_ratios=(0, 4, 16, 4, 0),
        # Few heads make exact-zero scores likely, and with them ties that another program may break otherwise.
        index_n_heads=32,
        index_head_dim=32,
        index_topk=6,
        hc_mult=4,
        hc_sinkhorn_iters=20,
        hc_eps=1e-6,
        rms_norm_eps=1e-6,
        rope_theta=10000.0,
        compress_rope_theta=160000.0,
        rope_scaling=RopeScaling(factor=16.0, original_max_position_embeddings=64),
        max_position_embeddings=4096,
        num_nextn_predict_layers=1,
        quantised=True,
        expert_dtype="fp4",
        drafter="mtp",
    )
    return replace(base, **changes)


class _Recorder:
    """A builder that writes down every stored tensor that a configuration needs."""

    def __init__(self, config: V4Config) -> None:
        self.config = config
        self.matrices: dict[str, tuple[str, tuple[int, int]]] = {}
        self.vectors: dict[str, tuple[int, ...]] = {}
        self.tables: dict[str, tuple[tuple[int, ...], int]] = {}

    def matrix(self, spec: MatrixSpec) -> Weight:
        formats = {
            LINEAR: FP8_BLOCK128 if self.config.quantised else PLAIN,
            EXPERT: {"fp4": FP4_BLOCK32, "fp8": FP8_BLOCK128}.get(self.config.expert_dtype, PLAIN),
        }
        for group in spec.groups:
            for part in group:
                self.matrices[part.stem] = formats.get(spec.role, PLAIN), (part.rows, spec.columns)
        return Weight(torch.empty(0, 0, device="meta"))

    def vector(self, name: str, shape: tuple[int, ...], *, split: bool = False) -> torch.Tensor:
        self.vectors[name] = shape
        return torch.empty(0, device="meta")

    def table(self, name: str, shape: tuple[int, ...], below: int) -> torch.Tensor:
        self.tables[name] = shape, below
        return torch.empty(0, device="meta")


class SyntheticSource:
    """A checkpoint that exists nowhere: every tensor is made when it is read, the same each time and on each rank.

    Args:
        seed: another seed, other weights.
        device: where tensors are made; numbers of one device differ from those of another.
    """

    def __init__(self, config: V4Config, seed: int = 0, device: torch.device | None = None) -> None:
        self.label = f"synthetic weights, seed {seed}"
        self._seed, self._device = seed, device or torch.device("cpu")
        self._layout = _Recorder(config)
        assemble(config, self._layout, mtp=True)
        self._entries = self._describe()

    def _describe(self) -> dict[str, Entry]:
        entries: dict[str, Entry] = {}

        def put(name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
            entries[name] = Entry(dtype, str(dtype).removeprefix("torch."), shape)

        for stem, (format, (rows, columns)) in self._layout.matrices.items():
            if format == PLAIN:
                put(f"{stem}.weight", torch.bfloat16, (rows, columns))
                continue
            put(f"{stem}.scale", torch.float8_e8m0fnu, Weight.scale_shape((rows, columns), format))
            if format == FP8_BLOCK128:
                put(f"{stem}.weight", torch.float8_e4m3fn, (rows, columns))
            else:
                put(f"{stem}.weight", torch.int8, (rows, columns // 2))
        for name, shape in self._layout.vectors.items():
            put(name, torch.bfloat16 if name.endswith(".weight") else torch.float32, shape)
        for name, (shape, _) in self._layout.tables.items():
            put(name, torch.int64, shape)
        return entries

    def names(self) -> Collection[str]:
        return self._entries.keys()

    def own_name(self, name: str) -> str:
        return name

    def entry(self, name: str) -> Entry | None:
        return self._entries.get(name)

    def read(self, name: str, *index: Index) -> torch.Tensor:
        tensor = self._make(name)
        return tensor[index] if index else tensor

    def _make(self, name: str) -> torch.Tensor:
        digest = hashlib.sha256(f"{self._seed}:{name}".encode()).digest()
        random = torch.Generator(self._device).manual_seed(int.from_bytes(digest[:7], "little"))
        entry = self._entries[name]
        assert entry.dtype is not None
        if name in self._layout.tables:
            return self._table(*self._layout.tables[name], random)
        if entry.dtype is torch.float8_e4m3fn:
            raw = torch.randint(0, 254, entry.shape, generator=random, device=self._device, dtype=torch.uint8)
            return (raw + (raw >= 127)).view(torch.float8_e4m3fn)  # skips 127 and, above it, never reaches 255: NaN
        if entry.dtype is torch.int8:
            return torch.randint(-128, 128, entry.shape, generator=random, device=self._device, dtype=torch.int8)
        if entry.dtype is torch.float8_e8m0fnu:
            return self._scales(name, entry.shape, random)
        mean, deviation = self._distribution(name)
        values = torch.randn(entry.shape, generator=random, device=self._device, dtype=torch.float32)
        return values.mul_(deviation).add_(mean).to(entry.dtype)

    def _scales(self, name: str, shape: tuple[int, ...], random: torch.Generator) -> torch.Tensor:
        """Exponents such that a product keeps the size of its input, within a factor of two from block to block."""
        format, (_, columns) = self._layout.matrices[name.removesuffix(".scale")]
        rms = _E4M3_RMS if format == FP8_BLOCK128 else _E2M1_RMS
        lower = _E8M0_ONE + math.floor(math.log2(columns**-0.5 / rms))
        exponents = torch.randint(lower, lower + 2, shape, generator=random, device=self._device, dtype=torch.uint8)
        return exponents.view(torch.float8_e8m0fnu)

    def _table(self, shape: tuple[int, ...], experts: int, random: torch.Generator) -> torch.Tensor:
        """Distinct experts for each token: a walk round all of them with a step that meets none twice."""
        steps = torch.tensor([s for s in range(1, experts + 1) if math.gcd(s, experts) == 1], device=self._device)
        tokens, chosen = shape
        first = torch.randint(0, experts, (tokens, 1), generator=random, device=self._device)
        which = torch.randint(0, len(steps), (tokens, 1), generator=random, device=self._device)
        return (first + steps[which] * torch.arange(chosen, device=self._device)) % experts

    def _distribution(self, name: str) -> tuple[float, float]:
        """Mean and standard deviation of a tensor stored as plain numbers."""
        last = name.rpartition(".")[2]
        if name in self._layout.vectors:
            shape = self._layout.vectors[name]
            if name.endswith("norm.weight"):
                return 1.0, 0.1
            if last.startswith("hc_"):
                return {"fn": (0.0, shape[-1] ** -0.5), "base": (0.0, 0.5), "scale": (0.7, 0.1)}[last.split("_")[-1]]
            return 0.0, {"attn_sink": 1.0, "bias": 0.1, "ape": 0.5}[last]
        _, (_, columns) = self._layout.matrices[name.removesuffix(".weight")]
        return 0.0, 1.0 if name == "embed.weight" else columns**-0.5


def synthetic_tensors(config: V4Config, seed: int = 0, *, plain: bool = False) -> dict[str, torch.Tensor]:
    """All tensors of a random checkpoint by published name.

    Args:
        plain: dequantised and in float32 (int64 for tables); else the formats that ``config`` promises.
    """
    source = SyntheticSource(config, seed)
    tensors = {name: source.read(name) for name in source.names()}
    return plain_tensors(tensors) if plain else tensors


def plain_tensors(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same checkpoint in float32 without scales; integers stay. Exact."""
    out: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if name.endswith(".scale"):
            continue
        scale = tensors.get(f"{name.removesuffix('.weight')}.scale")
        if scale is not None:
            format = FP8_BLOCK128 if tensor.dtype is torch.float8_e4m3fn else FP4_BLOCK32
            tensor = dequantise(Weight(tensor, scale, format), torch.float32).data
        out[name] = tensor.float() if tensor.is_floating_point() else tensor
    return out


def write_checkpoint(
    directory: str | Path, config: V4Config, tensors: Mapping[str, torch.Tensor], *, shards: int = 1
) -> Path:
    """Write ``config.json`` and the tensors: one file, or several with an index. Returns the directory."""
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config.to_dict(), indent=1), encoding="utf-8")
    if shards == 1:
        save_file(dict(tensors), str(directory / SINGLE), metadata={"format": "pt"})
        return directory
    weight_map = {name: f"model-{i % shards + 1:05}-of-{shards:05}.safetensors" for i, name in enumerate(tensors)}
    for file in sorted(set(weight_map.values())):
        part = {name: tensor for name, tensor in tensors.items() if weight_map[name] == file}
        save_file(part, str(directory / file), metadata={"format": "pt"})
    total = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / INDEX).write_text(json.dumps(index), encoding="utf-8")
    return directory
