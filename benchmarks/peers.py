"""Other people's programs, set up to do the same work as ours."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from halma.models.deepseek_v4.config import V4Config
from halma.models.deepseek_v4.config_names import transformers_fields
from halma.models.deepseek_v4.names import to_transformers
from halma.models.deepseek_v4.synthetic import plain_tensors


def transformers_model(config: V4Config, tensors: Mapping[str, torch.Tensor]) -> Any:
    """transformers' DeepseekV4ForCausalLM in float32 with ``tensors`` (published names, any stored format).

    transformers rounds nothing and has no MTP, so this is the exact arithmetic of the target model.
    """
    from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

    model = DeepseekV4ForCausalLM(DeepseekV4Config(**transformers_fields(config))).float().eval()
    missing, unexpected = model.load_state_dict(to_transformers(plain_tensors(tensors)), strict=False)
    left = [name for name in missing if "inv_freq" not in name]
    if left or unexpected:
        raise RuntimeError(f"the peer's weights do not match: missing {left[:5]}, unexpected {list(unexpected)[:5]}")
    return model


def transformers_checkpoint(directory: Path) -> Any:
    """The peer for a checkpoint directory in one file."""
    return transformers_model(V4Config.from_file(directory), load_file(directory / "model.safetensors"))
