"""What the tests of loading share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from halma.hal.errors import ModelError
from halma.models.deepseek_v4.checkpoint import load_checkpoint
from halma.models.deepseek_v4.weights import V4Weights
from halma.ops.weight import Weight


def matrices(weights: V4Weights) -> dict[str, Weight]:
    """Every matrix of layer 1 (CSA, scored) and of the draft module, by a short name."""
    layer, mtp = weights.layers[1], weights.mtp[0]
    assert layer.attn.compressor is not None and layer.attn.indexer is not None
    return {
        "embed": weights.embed,
        "head": weights.head,
        "wq_a_wkv": layer.attn.wq_a_wkv,
        "wq_b": layer.attn.wq_b,
        "wo_a": layer.attn.wo_a,
        "wo_b": layer.attn.wo_b,
        "compressor": layer.attn.compressor.wkv_wgate,
        "index_wq_b": layer.attn.indexer.wq_b,
        "weights_proj": layer.attn.indexer.weights_proj,
        "index_compressor": layer.attn.indexer.compressor.wkv_wgate,
        "gate": layer.ffn.gate,
        "gate_up": layer.ffn.gate_up,
        "down": layer.ffn.down,
        "shared_gate_up": layer.ffn.shared_gate_up,
        "shared_down": layer.ffn.shared_down,
        "e_proj": mtp.e_proj,
        "h_proj": mtp.h_proj,
    }


def equal(a: V4Weights, b: V4Weights) -> bool:
    pairs = list(zip(a.tensors(), b.tensors(), strict=True))
    return all(x == y and p.dtype == q.dtype and torch.equal(p, q) for (x, p), (y, q) in pairs)


def refused(directory: Path, **kwargs: Any) -> ModelError:
    """The refusal of a checkpoint directory; fails unless it says asked, found and do."""
    with pytest.raises(ModelError) as error:
        load_checkpoint(directory, **kwargs)
    assert error.value.asked and error.value.found and error.value.do, "a refusal says asked, found and do"
    return error.value
