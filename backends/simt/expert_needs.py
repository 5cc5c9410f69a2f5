"""What calls the routes ``simt`` of the experts' ops take, and why not others."""

from __future__ import annotations

from typing import Final

import torch

from halma.backends.simt.expert_sources import BITS, FRAGMENT_LANES, MOST_EXPERTS, why_not_sizes, why_not_wide
from halma.hal.collectives.expert_rows import takes_skipped
from halma.hal.errors import HalmaError
from halma.hal.registry import default_registry
from halma.hal.routes import Call

_FORMATS: Final = {"plain": "bf16", "fp8_block128": "e4m3", "fp4_block32": "e2m1"}


def short(dtype: torch.dtype) -> str:
    """Its name without ``torch.``."""
    return str(dtype).removeprefix("torch.")


def _weights(call: Call) -> str | None:
    gate_up, down = call["gate_up"], call["down"]
    if gate_up.format != down.format:
        return f"gate_up is {gate_up.format} and down {down.format}, it takes one format"
    if gate_up.format == "plain":
        layers = getattr(gate_up, "layers", (gate_up,))
        if layers[0].data.dtype is not torch.bfloat16:
            return f"plain weights are {short(layers[0].data.dtype)}, it multiplies bfloat16"
        if gate_up.activation or down.activation:
            return "activations are rounded for plain weights, it multiplies them as they are"
    elif not (gate_up.activation == down.activation == "fp8"):
        return f"activations are not rounded, its {_FORMATS[gate_up.format]} products take e4m3"
    experts, _, width = gate_up.shape
    if experts > MOST_EXPERTS:
        return f"{experts} experts, its tables hold {MOST_EXPERTS}"
    return why_not_sizes(BITS[gate_up.format], width, down.shape[2]) or _other_warps(call.backend)


def _other_warps(backend: str) -> str | None:
    """Why the device of this backend cannot hold a product's fragments, or None; of one that cannot be opened nobody
    asks for a product."""
    try:
        width = default_registry().select(backend).capabilities.warp_width
    except HalmaError:
        return None
    if width == FRAGMENT_LANES:
        return None
    return f"warp_width is {width}, fragments of its products lie on warps of {FRAGMENT_LANES} lanes"


def fits_ffn(call: Call) -> str | None:
    """Requirement of ``expert_ffn``."""
    x, weights = call["x"], call["weights"]
    if x.dtype is not torch.bfloat16:
        return f"x is {short(x.dtype)}, it reads bfloat16"
    if weights.dtype is not torch.float32:
        return f"weights are {short(weights.dtype)}, it sums in float32"
    return _weights(call)


def fits_grouped(call: Call) -> str | None:
    """Requirement of ``grouped_ffn``."""
    return fits_rows(call) or _weights(call)


def fits_rows(call: Call) -> str | None:
    """What of it has nothing to do with the weights' sizes."""
    rows, weights, dtype = call["rows"], call["slot_weights"], call["dtype"]
    if (reason := takes_skipped(call)) is not None:
        return reason
    if rows.dtype not in (torch.bfloat16, torch.float8_e4m3fn):
        return f"rows are {short(rows.dtype)}, it reads bfloat16 or e4m3"
    if rows.dtype is not torch.bfloat16 and call["gate_up"].format == "plain":
        return "the payload is rounded and the weights are plain"
    if weights.dtype is not torch.float32:
        return f"weights of slots are {short(weights.dtype)}, it sums in float32"
    if dtype not in (None, torch.float32, torch.bfloat16):
        return f"the result is {short(dtype)}, it writes float32 or bfloat16"
    return None


def fits_wide(call: Call) -> str | None:
    """Requirement of wide items, beside that of the op."""
    if call["down"].format == "fp4_block32":
        return None
    _, width, inner = call["down"].shape
    return why_not_wide(width, inner)


def fits_layout(call: Call) -> str | None:
    """Requirement of ``expert_layout``."""
    if call["weights"].dtype is not torch.float32:
        return f"weights are {short(call['weights'].dtype)}, it moves float32"
    experts = call["experts"]
    return takes_skipped(call) if experts <= MOST_EXPERTS else f"{experts} experts, its tables hold {MOST_EXPERTS}"


def fits_sum(call: Call) -> str | None:
    """Requirement of ``expert_sum``."""
    parts = call["parts"]
    if parts.dtype is not torch.float32:
        return f"parts are {short(parts.dtype)}, it adds float32"
    return f"D = {parts.shape[1]} is no multiple of 4" if parts.shape[1] % 4 else None
