"""Models that halma knows by name: the published configurations, and the tiny model in the package."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from halma.hal.errors import ModelError
from halma.models.deepseek_v4.config import RopeScaling, V4Config

TINY = "tiny-v4"


def v4_flash() -> V4Config:
    """DeepSeek-V4-Flash, first release: 284 B parameters, 13 B active, one MTP module."""
    return _published(
        hidden_size=4096,
        moe_intermediate_size=2048,
        compress_ratios=(0, 0, *((4, 128) * 20), 4, 0),
        num_attention_heads=64,
        q_lora_rank=1024,
        o_groups=8,
        n_routed_experts=256,
        routed_scaling_factor=1.5,
        index_topk=512,
    )


def v4_flash_shaped(layers: int) -> V4Config:
    """The first layers of V4-Flash, and its MTP module: for timing, with weights made of a seed."""
    whole = v4_flash()
    return replace(
        whole,
        num_hidden_layers=layers,
        compress_ratios=(*whole.compress_ratios[:layers], whole.compress_ratios[-1]),
        num_hash_layers=min(layers, whole.num_hash_layers),
    )


def v4_pro() -> V4Config:
    """DeepSeek-V4-Pro, first release: 1.6 T parameters, 49 B active, one MTP module."""
    return _published(
        hidden_size=7168,
        moe_intermediate_size=3072,
        compress_ratios=(128, 128, *((4, 128) * 29), 4, 0),
        num_attention_heads=128,
        q_lora_rank=1536,
        o_groups=16,
        n_routed_experts=384,
        routed_scaling_factor=2.5,
        index_topk=1024,
    )


def _published(
    *,
    hidden_size: int,
    moe_intermediate_size: int,
    compress_ratios: tuple[int, ...],
    num_attention_heads: int,
    q_lora_rank: int,
    o_groups: int,
    n_routed_experts: int,
    routed_scaling_factor: float,
    index_topk: int,
) -> V4Config:
    """What the two published sizes differ in; the rest is equal."""
    return V4Config(
        vocab_size=129280,
        hidden_size=hidden_size,
        moe_intermediate_size=moe_intermediate_size,
        num_hidden_layers=len(compress_ratios) - 1,
        num_attention_heads=num_attention_heads,
        head_dim=512,
        qk_rope_head_dim=64,
        q_lora_rank=q_lora_rank,
        o_groups=o_groups,
        o_lora_rank=1024,
        n_routed_experts=n_routed_experts,
        num_experts_per_tok=6,
        num_hash_layers=3,
        routed_scaling_factor=routed_scaling_factor,
        swiglu_limit=10.0,
        sliding_window=128,
        compress_ratios=compress_ratios,
        index_n_heads=64,
        index_head_dim=128,
        index_topk=index_topk,
        hc_mult=4,
        hc_sinkhorn_iters=20,
        hc_eps=1e-6,
        rms_norm_eps=1e-6,
        rope_theta=10000.0,
        compress_rope_theta=160000.0,
        rope_scaling=RopeScaling(factor=16.0, original_max_position_embeddings=65536),
        max_position_embeddings=1 << 20,
        num_nextn_predict_layers=1,
        quantised=True,
        expert_dtype="fp4",
        drafter="mtp",
    )


def tiny_directory() -> Path:
    """Where the package keeps the tiny checkpoint."""
    import halma

    return Path(halma.__file__).parent / "data" / TINY


def tiny_v4() -> V4Config:
    """The tiny checkpoint that comes with halma: four layers of every kind and an MTP module."""
    return V4Config.from_file(tiny_directory())


PRESETS: dict[str, Callable[[], V4Config]] = {TINY: tiny_v4, "V4-Flash": v4_flash, "V4-Pro": v4_pro}


def preset(name: str) -> V4Config:
    """A configuration by name, whatever its case.

    Raises:
        ModelError: unknown name.
    """
    for known, make in PRESETS.items():
        if name.lower() == known.lower():
            return make()
    raise _unknown(name)


def model_directory(name: str) -> Path:
    """The checkpoint directory for what a user typed: ``tiny-v4`` or a path.

    Raises:
        ModelError: neither a known model nor a directory; or a preset, which has no weights.
    """
    if name.lower() == TINY:
        return tiny_directory()
    path = Path(name).expanduser()
    if name and path.is_dir():  # an empty name would be the current folder
        return path
    if any(name.lower() == known.lower() for known in PRESETS):
        raise ModelError(
            f"{name} is known as a configuration; its weights do not come with halma",
            asked=name,
            found=f"no directory {name!r} here",
            do=f"download the checkpoint and give its directory, or use {TINY}",
        )
    if path.is_file():
        raise ModelError(
            "a model is a directory",
            asked=name,
            found="a file",
            do=f"give the directory that holds config.json and the weights: {path.parent}",
        )
    raise _unknown(name)


def _unknown(name: str) -> ModelError:
    close = difflib.get_close_matches(name.lower(), [known.lower() for known in PRESETS], n=1)
    meant = [known for known in PRESETS if known.lower() in close]
    return ModelError(
        f'no model called "{name}"' + (f' (did you mean "{meant[0]}"?)' if meant else ""),
        asked=f"--model {name}",
        found=f"known names: {', '.join(PRESETS)}; and no directory of that name",
        do=f"give {TINY}, or a directory with config.json and safetensors files",
    )
