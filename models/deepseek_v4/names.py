"""Tensor names: the published checkpoint's, and transformers' for the same tensors.

transformers stacks the experts of a layer into two tensors, so a published name maps to a :class:`Place`:
a tensor, perhaps one expert in it, perhaps one half of that expert's rows. The MTP module, which
transformers does not have, keeps its prefix ``mtp.N.`` with the block under ``mtp.N.block.``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch

_TOP = {
    "embed.weight": "model.embed_tokens.weight",
    "head.weight": "lm_head.weight",
    "norm.weight": "model.norm.weight",
    "hc_head_fn": "model.hc_head.hc_fn",
    "hc_head_base": "model.hc_head.hc_base",
    "hc_head_scale": "model.hc_head.hc_scale",
}

_MTP = {
    "e_proj.weight": "e_proj.weight",
    "h_proj.weight": "h_proj.weight",
    "enorm.weight": "enorm.weight",
    "hnorm.weight": "hnorm.weight",
    "norm.weight": "norm.weight",
    "hc_head_fn": "hc_head.hc_fn",
    "hc_head_base": "hc_head.hc_base",
    "hc_head_scale": "hc_head.hc_scale",
}


def _compressor(official: str, theirs: str) -> dict[str, str]:
    return {
        f"{official}.wkv.weight": f"{theirs}.kv_proj.weight",
        f"{official}.wgate.weight": f"{theirs}.gate_proj.weight",
        f"{official}.ape": f"{theirs}.position_bias",
        f"{official}.norm.weight": f"{theirs}.kv_norm.weight",
    }


_LAYER = {
    "attn_norm.weight": "input_layernorm.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    **{f"hc_{part}_{name}": f"{part}_hc.{name}" for part in ("attn", "ffn") for name in ("fn", "base", "scale")},
    "attn.wq_a.weight": "self_attn.q_a_proj.weight",
    "attn.q_norm.weight": "self_attn.q_a_norm.weight",
    "attn.wq_b.weight": "self_attn.q_b_proj.weight",
    "attn.wkv.weight": "self_attn.kv_proj.weight",
    "attn.kv_norm.weight": "self_attn.kv_norm.weight",
    "attn.wo_a.weight": "self_attn.o_a_proj.weight",
    "attn.wo_b.weight": "self_attn.o_b_proj.weight",
    "attn.attn_sink": "self_attn.sinks",
    **_compressor("attn.compressor", "self_attn.compressor"),
    **_compressor("attn.indexer.compressor", "self_attn.compressor.indexer"),
    "attn.indexer.wq_b.weight": "self_attn.compressor.indexer.q_b_proj.weight",
    "attn.indexer.weights_proj.weight": "self_attn.compressor.indexer.scorer.weights_proj.weight",
    "ffn.gate.weight": "mlp.gate.weight",
    "ffn.gate.bias": "mlp.gate.e_score_correction_bias",
    "ffn.gate.tid2eid": "mlp.gate.tid2eid",
    "ffn.shared_experts.w1.weight": "mlp.shared_experts.gate_proj.weight",
    "ffn.shared_experts.w3.weight": "mlp.shared_experts.up_proj.weight",
    "ffn.shared_experts.w2.weight": "mlp.shared_experts.down_proj.weight",
}

_PREFIX = re.compile(r"(layers|mtp)\.(\d+)\.(.+)")
_EXPERT = re.compile(r"ffn\.experts\.(\d+)\.w([123])\.weight")


@dataclass(frozen=True)
class Place:
    """Where transformers keeps a published tensor.

    Attributes:
        tensor: its name there.
        expert: index into the first dimension, where experts are stacked.
        half: 0 for the first half of that expert's rows, 1 for the second, None for all.
    """

    tensor: str
    expert: int | None = None
    half: int | None = None


def transformers_place(name: str) -> Place | None:
    """The place of a published tensor name, or None where transformers has nothing of the kind (scales)."""
    if name in _TOP:
        return Place(_TOP[name])
    match = _PREFIX.fullmatch(name)
    if match is None:
        return None
    kind, number, rest = match.groups()
    if kind == "mtp" and rest in _MTP:
        return Place(f"mtp.{number}.{_MTP[rest]}")
    prefix = f"model.layers.{number}" if kind == "layers" else f"mtp.{number}.block"
    if rest in _LAYER:
        return Place(f"{prefix}.{_LAYER[rest]}")
    expert = _EXPERT.fullmatch(rest)
    if expert is None:
        return None
    index, matrix = int(expert[1]), expert[2]
    if matrix == "2":
        return Place(f"{prefix}.mlp.experts.down_proj", index)
    return Place(f"{prefix}.mlp.experts.gate_up_proj", index, 0 if matrix == "1" else 1)


def to_transformers(tensors: Mapping[str, torch.Tensor], *, mtp: bool = False) -> dict[str, torch.Tensor]:
    """Published names to transformers' state dict, experts stacked (copies); plain tensors only.

    Args:
        mtp: keep the MTP module's tensors under ``mtp.``; transformers' own model takes none.

    Raises:
        ValueError: a tensor without a place, such as a scale.
    """
    single: dict[str, torch.Tensor] = {}
    stacked: dict[str, dict[tuple[int, int], torch.Tensor]] = {}
    for name, tensor in tensors.items():
        if name.startswith("mtp.") and not mtp:
            continue
        place = transformers_place(name)
        if place is None:
            raise ValueError(f"transformers has no place for {name}; dequantise first")
        if place.expert is None:
            single[place.tensor] = tensor
        else:
            stacked.setdefault(place.tensor, {})[place.expert, place.half or 0] = tensor
    for name, parts in stacked.items():
        experts = sorted({expert for expert, _ in parts})
        rows = [torch.cat([parts[key] for key in sorted(parts) if key[0] == expert]) for expert in experts]
        single[name] = torch.stack(rows)
    return single


_BACK_TOP = {theirs: ours for ours, theirs in _TOP.items()}
_BACK_MTP = {theirs: ours for ours, theirs in _MTP.items()}
_BACK_LAYER = {theirs: ours for ours, theirs in _LAYER.items()}
_THEIR_PREFIX = re.compile(r"(?:model\.(layers)\.(\d+)|(mtp)\.(\d+)\.block)\.(.+)")


def from_transformers(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """transformers' state dict to published names, experts taken apart (views); unknown names are left out."""
    official: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if name in _BACK_TOP:
            official[_BACK_TOP[name]] = tensor
            continue
        match = _THEIR_PREFIX.fullmatch(name)
        if match is None:
            prefix, _, rest = name.partition(".")
            number, _, rest = rest.partition(".")
            if prefix == "mtp" and rest in _BACK_MTP:
                official[f"mtp.{number}.{_BACK_MTP[rest]}"] = tensor
            continue
        prefix, rest = f"{match[1] or match[3]}.{match[2] or match[4]}", match[5]
        if rest in _BACK_LAYER:
            official[f"{prefix}.{_BACK_LAYER[rest]}"] = tensor
        elif rest == "mlp.experts.down_proj":
            for index, matrix in enumerate(tensor):
                official[f"{prefix}.ffn.experts.{index}.w2.weight"] = matrix
        elif rest == "mlp.experts.gate_up_proj":
            for index, matrix in enumerate(tensor):
                gate, up = matrix.chunk(2)
                official[f"{prefix}.ffn.experts.{index}.w1.weight"] = gate
                official[f"{prefix}.ffn.experts.{index}.w3.weight"] = up
    return official
