"""What a program is, as facts for guards (:mod:`halma.hal.policy`): the model, its execution and the device."""

from __future__ import annotations

from typing import Any

import torch

from halma.hal.backend import Backend
from halma.models.deepseek_v4.config import V4Config
from halma.models.deepseek_v4.config_fields import FIXED, MODEL_TYPE, QUANTISATION

ARCHITECTURE = "DeepseekV4ForCausalLM"


def model_facts(config: V4Config, carrier: torch.dtype) -> dict[str, Any]:
    """The identity of a model: every field that a kernel was ever calibrated for."""
    block = QUANTISATION["weight_block_size"]
    return {
        "model.architecture": ARCHITECTURE,
        "model.type": MODEL_TYPE,
        "model.dtype": str(carrier).removeprefix("torch."),
        "model.quantization": "fp8" if config.quantised else "none",
        "model.block_rows": block[0] if config.quantised else 0,
        "model.block_columns": block[1] if config.quantised else 0,
        "model.hidden_size": config.hidden_size,
        "model.layers": config.num_hidden_layers,
        "model.heads": config.num_attention_heads,
        "model.kv_heads": FIXED["num_key_value_heads"],
        "model.head_dim": config.head_dim,
        "model.vocab_size": config.vocab_size,
        "model.experts": config.n_routed_experts,
        "model.experts_per_token": config.num_experts_per_tok,
        "model.shared_experts": FIXED["n_shared_experts"],
        "model.expert_inner": config.moe_intermediate_size,
        "model.expert_dtype": config.expert_dtype,
        "model.activation": FIXED["hidden_act"],
        "model.swiglu_limit": config.swiglu_limit,
        "model.index_topk": config.index_topk,
    }


def device_facts(backend: Backend) -> dict[str, Any]:
    """The architecture and the number of multiprocessors, where the device says them."""
    found = backend.device.properties()
    facts: dict[str, Any] = {}
    if "arch" in found:
        facts["device.arch"] = found["arch"]
    if found.get("multiprocessors", "").isdecimal():
        facts["device.multiprocessors"] = int(found["multiprocessors"])
    return facts
