"""What a program is, as facts for guards (:mod:`halma.hal.policy`): the model, its execution and the device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from halma.hal.backend import Backend
from halma.hal.graph.breakable import CaptureMode
from halma.hal.graph.scope import why_unsupported
from halma.models.deepseek_v4.config import V4Config
from halma.models.deepseek_v4.config_fields import FIXED, MODEL_TYPE, QUANTISATION
from halma.models.deepseek_v4.experts import Experts
from halma.models.deepseek_v4.ranks import Ranks
from halma.models.deepseek_v4.state import RowFormats

if TYPE_CHECKING:
    from halma.models.deepseek_v4.runner import RunnerOptions

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


def execution_facts(backend: Backend, options: RunnerOptions, ranks: Ranks, experts: Experts) -> dict[str, Any]:
    """How a model is run, as far as it can be run in several ways here. There is one pipeline stage and no compiler."""

    def how(role: str, wanted: bool = True) -> str:
        off = options.switch.off_reason(role) or why_unsupported(backend, CaptureMode.FULL)
        return "captured" if wanted and off is None else "eager"

    return {
        "execution.tensor_parallel": ranks.size,
        "execution.experts": "own" if experts.held is True else "of other ranks",
        "execution.cache": RowFormats.of(options.arithmetic, options.index_format).kv,
        "execution.decode": how("verify" if options.mtp else "decode"),
        "execution.prefill": how("prefill", options.captures_prefill),
    }


def program_facts(
    config: V4Config, backend: Backend, options: RunnerOptions, carrier: torch.dtype, ranks: Ranks, experts: Experts
) -> dict[str, Any]:
    """All of them."""
    return {
        **model_facts(config, carrier), **execution_facts(backend, options, ranks, experts), **device_facts(backend)
    }  # fmt: skip


def device_facts(backend: Backend) -> dict[str, Any]:
    """The architecture and the number of multiprocessors, where the device says them."""
    found = backend.device.properties()
    facts: dict[str, Any] = {}
    if "arch" in found:
        facts["device.arch"] = found["arch"]
    if found.get("multiprocessors", "").isdecimal():
        facts["device.multiprocessors"] = int(found["multiprocessors"])
    return facts
