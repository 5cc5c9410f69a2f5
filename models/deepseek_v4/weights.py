"""The weights of a model, in the shape that the programs read them.

Matrices are :class:`halma.ops.weight.Weight`. Everything else (norms, hyper-connections, biases, position
biases, sinks) is a plain tensor in the accumulator's dtype: float32, or float64 with a float64 carrier.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass

import torch

from halma.ops.weight import Weight


@dataclass(frozen=True, eq=False, repr=False)
class HyperConnection:
    """How a sublayer reads the residual streams and writes to them.

    ``fn [2n + n*n, nD]``, ``base [2n + n*n]``, ``scale [3]``; at the head ``[n, nD]``, ``[n]``, ``[1]``.
    """

    fn: torch.Tensor
    base: torch.Tensor
    scale: torch.Tensor


@dataclass(frozen=True, eq=False, repr=False)
class CompressorWeights:
    """Pools blocks of tokens; w = 2 * width where blocks overlap (CSA), else width.

    ``wkv_wgate [2w, D]``: value rows, then gate rows; ``ape [ratio, w]``; ``norm [width]``.
    """

    wkv_wgate: Weight
    ape: torch.Tensor
    norm: torch.Tensor


@dataclass(frozen=True, eq=False, repr=False)
class IndexerWeights:
    """Chooses compressed rows: ``wq_b [Hi * di, q_lora]``, ``weights_proj [Hi, D]``. Whole on every rank."""

    wq_b: Weight
    weights_proj: Weight
    compressor: CompressorWeights


@dataclass(frozen=True, eq=False, repr=False)
class AttentionWeights:
    """One attention sublayer; with tensor parallelism H and G are this rank's heads and groups.

    ``wq_a_wkv [q_lora + d, D]``, ``wq_b [H * d, q_lora]``, ``wo_a [G * o_lora, H / G * d]``,
    ``wo_b [D, G * o_lora]``, ``q_norm [q_lora]``, ``kv_norm [d]``, ``sink [H]``.
    """

    wq_a_wkv: Weight
    q_norm: torch.Tensor
    wq_b: Weight
    kv_norm: torch.Tensor
    wo_a: Weight
    wo_b: Weight
    sink: torch.Tensor
    compressor: CompressorWeights | None = None
    indexer: IndexerWeights | None = None


@dataclass(frozen=True, eq=False, repr=False)
class FfnWeights:
    """Experts and their router; I is this rank's part of the intermediate width.

    ``gate [E, D]``; ``bias [E]`` or, in hash-routed layers, ``tid2eid`` int64 ``[vocab, k]``;
    ``gate_up [E, 2I, D]`` and ``shared_gate_up [2I, D]`` hold gate rows (w1), then up rows (w3);
    ``down [E, D, I]``, ``shared_down [D, I]``. Where other ranks hold the experts these four are empty; where this
    rank holds experts alone, E of them, the router is. ``layer``: number of the layer, MTP modules behind the rest.
    """

    gate: Weight
    bias: torch.Tensor | None
    tid2eid: torch.Tensor | None
    gate_up: Weight
    down: Weight
    shared_gate_up: Weight
    shared_down: Weight
    layer: int = 0


@dataclass(frozen=True, eq=False, repr=False)
class LayerWeights:
    """One layer, ``attn_norm`` and ``ffn_norm`` [D]."""

    attn_norm: torch.Tensor
    ffn_norm: torch.Tensor
    hc_attn: HyperConnection
    hc_ffn: HyperConnection
    attn: AttentionWeights
    ffn: FfnWeights


@dataclass(frozen=True, eq=False, repr=False)
class MtpWeights:
    """One MTP module; embedding and head are those of the target.

    ``e_proj``, ``h_proj`` ``[D, D]``; ``enorm``, ``hnorm``, ``norm`` ``[D]``.
    """

    e_proj: Weight
    h_proj: Weight
    enorm: torch.Tensor
    hnorm: torch.Tensor
    norm: torch.Tensor
    hc_head: HyperConnection
    block: LayerWeights


@dataclass(frozen=True, eq=False, repr=False)
class V4Weights:
    """A whole model, or one rank's part: ``embed`` and ``head`` [vocab / world, D], ``norm [D]``."""

    embed: Weight
    head: Weight
    norm: torch.Tensor
    hc_head: HyperConnection
    layers: tuple[LayerWeights, ...]
    mtp: tuple[MtpWeights, ...] = ()

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every tensor with its path, such as ``layers.0.attn.wq_b.scale``."""
        yield from _tensors("", self)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return nbytes_of(self)


def no_weight() -> Weight:
    """In place of a matrix that other ranks hold; a product with it fails."""
    return Weight(torch.empty(0, 0))


def nbytes_of(part: object) -> int:
    """Bytes of the tensors in a record of weights, or in a tuple of them."""
    return sum(tensor.nbytes for _, tensor in _tensors("", part))


def _tensors(path: str, value: object) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, tuple):
        for index, item in enumerate(value):
            yield from _tensors(f"{path}.{index}", item)
    elif is_dataclass(value):
        for field in fields(value):
            if field.name not in ("shape", "plan_key"):
                yield from _tensors(f"{path}.{field.name}".lstrip("."), getattr(value, field.name))
