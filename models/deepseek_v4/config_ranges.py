"""What every field of a configuration may be."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from halma.models.deepseek_v4.config import V4Config

DRAFTERS = ("mtp", "dspark", None)
EXPERT_DTYPES = ("fp4", "fp8", "plain")

_LARGE = 2**31 - 1
_INT_RANGES: dict[str, tuple[int, int]] = {
    "vocab_size": (1, _LARGE),
    "hidden_size": (1, _LARGE),
    "moe_intermediate_size": (1, _LARGE),
    "num_hidden_layers": (1, 10_000),
    "num_attention_heads": (1, 65_536),
    "head_dim": (2, 65_536),
    "qk_rope_head_dim": (2, 65_536),
    "q_lora_rank": (1, _LARGE),
    "o_groups": (1, 65_536),
    "o_lora_rank": (1, _LARGE),
    "n_routed_experts": (1, 1_000_000),
    "num_experts_per_tok": (1, 1_000_000),
    "num_hash_layers": (0, 10_000),
    "sliding_window": (1, _LARGE),
    "index_n_heads": (1, 65_536),
    "index_head_dim": (2, 65_536),
    "index_topk": (1, _LARGE),
    "hc_mult": (1, 64),
    "hc_sinkhorn_iters": (1, 1_000),
    "max_position_embeddings": (1, _LARGE),
    "num_nextn_predict_layers": (0, 100),
    "bos_token_id": (0, _LARGE),
    "eos_token_id": (0, _LARGE),
}
_POSITIVE = ("routed_scaling_factor", "swiglu_limit", "hc_eps", "rms_norm_eps")
_ABOVE_ONE = ("rope_theta", "compress_rope_theta")


def out_of_range(c: V4Config) -> list[str]:
    """Every problem as ``field = value; range``; empty for a good configuration."""
    problems = [
        f"{name} = {getattr(c, name)}; must be {low} to {high}"
        for name, (low, high) in _INT_RANGES.items()
        if not low <= getattr(c, name) <= high
    ]
    for names, low in ((_POSITIVE, 0), (_ABOVE_ONE, 1)):
        for name in names:
            value = getattr(c, name)
            if not (math.isfinite(value) and value > low):
                problems.append(f"{name} = {value}; must be a finite number above {low}")
    if problems:  # the relations below would divide by what is wrong
        return problems
    return [text for holds, text in (*_relations(c), *_rope_relations(c), *_ratio_relations(c)) if not holds]


def _relations(c: V4Config) -> list[tuple[bool, str]]:
    last = c.vocab_size - 1
    return [
        (
            c.num_attention_heads % c.o_groups == 0,
            f"o_groups = {c.o_groups}; must divide num_attention_heads = {c.num_attention_heads}",
        ),
        (
            c.num_experts_per_tok <= c.n_routed_experts,
            f"num_experts_per_tok = {c.num_experts_per_tok}; must be 1 to n_routed_experts = {c.n_routed_experts}",
        ),
        (
            c.num_hash_layers <= c.num_hidden_layers,
            f"num_hash_layers = {c.num_hash_layers}; must be 0 to num_hidden_layers = {c.num_hidden_layers}",
        ),
        (
            c.expert_dtype in EXPERT_DTYPES,
            f"expert_dtype = {c.expert_dtype!r}; must be one of {', '.join(EXPERT_DTYPES)}",
        ),
        (
            # fp4 packs 32 columns under one scale; both widths are contracted by an expert product
            c.expert_dtype != "fp4" or (c.hidden_size % 32 == 0 and c.moe_intermediate_size % 32 == 0),
            f"hidden_size = {c.hidden_size}, moe_intermediate_size = {c.moe_intermediate_size}; "
            "must be multiples of 32 with fp4 experts",
        ),
        (c.drafter in DRAFTERS, f"drafter = {c.drafter!r}; must be mtp, dspark or None"),
        (c.bos_token_id <= last, f"bos_token_id = {c.bos_token_id}; must be 0 to {last} (vocab_size - 1)"),
        (c.eos_token_id <= last, f"eos_token_id = {c.eos_token_id}; must be 0 to {last} (vocab_size - 1)"),
    ]


def _rope_relations(c: V4Config) -> list[tuple[bool, str]]:
    scaling, rope = c.rope_scaling, c.qk_rope_head_dim
    power = c.index_head_dim & (c.index_head_dim - 1) == 0
    return [
        (
            rope % 2 == 0 and rope <= c.head_dim,
            f"qk_rope_head_dim = {rope}; must be even and 2 to head_dim = {c.head_dim}",
        ),
        (power, f"index_head_dim = {c.index_head_dim}; must be a power of two (the Hadamard rotation needs it)"),
        (
            rope <= c.index_head_dim,
            f"qk_rope_head_dim = {rope}; must be 2 to index_head_dim = {c.index_head_dim}",
        ),
        (
            math.isfinite(scaling.factor) and scaling.factor >= 1,
            f"rope_scaling.factor = {scaling.factor}; must be a finite number, 1 or more",
        ),
        (
            1 <= scaling.original_max_position_embeddings <= _LARGE,
            f"rope_scaling.original_max_position_embeddings = {scaling.original_max_position_embeddings}; "
            f"must be 1 to {_LARGE}",
        ),
        (
            math.isfinite(scaling.beta_fast) and 0 < scaling.beta_slow <= scaling.beta_fast,
            f"rope_scaling.beta_slow = {scaling.beta_slow}; must be above 0, at most beta_fast = {scaling.beta_fast}",
        ),
    ]


def _ratio_relations(c: V4Config) -> list[tuple[bool, str]]:
    wanted = c.num_hidden_layers + (c.num_nextn_predict_layers if c.drafter == "mtp" else 0)
    parts = f"num_hidden_layers = {c.num_hidden_layers}"
    if c.drafter == "mtp":
        parts += f" (+ num_nextn_predict_layers = {c.num_nextn_predict_layers})"
    wrong = [ratio for ratio in c.compress_ratios if not (ratio == 0 or 2 <= ratio <= _LARGE)]
    mtp = [ratio for ratio in c.compress_ratios[c.num_hidden_layers :] if ratio]
    return [
        (
            len(c.compress_ratios) == wanted,
            f"compress_ratios has {len(c.compress_ratios)} entries; must have {wanted}: {parts}",
        ),
        (
            not wrong,
            f"compress_ratios holds {wrong[:5]}; must be 0 (window only), 4 (CSA) or another number >= 2 (HCA)",
        ),
        (
            not mtp or len(c.compress_ratios) != wanted,
            f"compress_ratios ends in {mtp[:5]}; must be 0 for MTP modules, whose tensors hold no compressor",
        ),
        (
            c.drafter != "mtp" or c.num_nextn_predict_layers > 0,
            "drafter = 'mtp'; must be None while num_nextn_predict_layers = 0",
        ),
    ]
