"""A small random V4 model with every kind of layer, and runners on it, shared by the tests of this folder."""

from __future__ import annotations

import functools
from typing import Any

import torch

import halma
from halma.models.deepseek_v4.config import V4Config
from halma.models.deepseek_v4.engine import Engine, Request
from halma.models.deepseek_v4.runner import RunnerOptions, V4Runner
from halma.models.deepseek_v4.weights import V4Weights

SMALL: dict[str, Any] = {
    "model_type": "deepseek_v4",
    "vocab_size": 200,
    "hidden_size": 128,
    "moe_intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 128,
    "qk_rope_head_dim": 64,
    "q_lora_rank": 128,
    "o_groups": 2,
    "o_lora_rank": 64,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "num_hash_layers": 1,
    "scoring_func": "sqrtsoftplus",
    "norm_topk_prob": True,
    "topk_method": "noaux_tc",
    "routed_scaling_factor": 1.5,
    "swiglu_limit": 10.0,
    "sliding_window": 16,
    "compress_ratios": [0, 4, 32],
    "index_n_heads": 4,
    "index_head_dim": 128,
    "index_topk": 8,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "rope_theta": 10000,
    "compress_rope_theta": 160000,
    "rope_scaling": {
        "type": "yarn", "factor": 16, "original_max_position_embeddings": 65536, "beta_fast": 32, "beta_slow": 1,
    },
    "max_position_embeddings": 4096,
    "num_nextn_predict_layers": 0,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
}  # fmt: skip


@functools.cache
def small_model(arithmetic: str) -> tuple[V4Config, V4Weights]:
    raise NotImplementedError


_runners: dict[Any, V4Runner] = {}


def small_runner(arithmetic: str, *, fresh: bool = False, **options: Any) -> V4Runner:
    """A runner on the small model, captured once and shared by tests that ask for the same options."""
    options = {"max_context": 256, "chunk": 16, "arithmetic": arithmetic, **options}
    options["batches"] = tuple(sorted({1, options.get("max_requests", 1)}))
    key = tuple(sorted(options.items()))
    if not fresh and key in _runners:
        return _runners[key]
    config, weights = small_model(arithmetic)
    runner = V4Runner(config, weights, halma.backend("cpu"), RunnerOptions(**options))
    runner.prepare(runner.descriptors(("greedy", "sample")))
    if not fresh:
        _runners[key] = runner
    return runner


@functools.cache
def alone(arithmetic: str, request: Request, *, max_context: int = 256) -> list[int]:
    """What ``request`` gets from an engine that serves nobody else, eagerly."""
    runner = small_runner(arithmetic, graph=False, max_context=max_context)
    return Engine(runner).run([request])[0].tokens


def poison(tensor: torch.Tensor) -> None:
    """The worst a row can hold: NaN, or the least integer."""
    tensor.fill_(float("nan") if tensor.is_floating_point() else torch.iinfo(tensor.dtype).min)
