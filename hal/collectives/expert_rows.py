"""What dispatch hands to the experts and combine takes back: rows, and which slot of which expert reads which row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch

from halma.hal.device_value import DeviceValue
from halma.hal.errors import CollectiveError
from halma.hal.routes import Call


def slot_capacity(pairs: int, experts: int, alignment: int = 1) -> int:
    """Slots that hold any routing of ``pairs`` (token, expert) pairs over ``experts``, each starting aligned.

    Every expert may lose ``alignment - 1`` slots before the next one; never below one aligned group, so that a rank
    without tokens still has addresses (deepseek-ai/DeepEP's null pointers, uccl-project/uccl#898).

    Raises:
        CollectiveError: no experts, a negative number of pairs or an alignment below 1.
    """
    if pairs < 0 or experts < 1 or alignment < 1:
        raise CollectiveError(
            "no slots can be laid out for this",
            asked=f"{pairs} pairs over {experts} experts, aligned to {alignment}",
            do="at least one expert, an alignment of 1 or more",
        )
    slots = pairs + experts * (alignment - 1)
    return max(-(-slots // alignment), 1) * alignment


SKIPPED: Final = "skipped"
"""Gaps and tail belong to no expert: counts are those of real pairs. What a product that walks offsets needs."""
CHARGED: Final = "charged"
"""Every slot belongs to an expert: gaps to the one before them, the tail to the last one, so that counts sum to the
slots there are. What a grouped product needs whose rows must sum to the padded total (the AFD plugin's did)."""


def takes_skipped(call: Call) -> str | None:
    """Requirement of a route that walks offsets: of charged padding it would work on every slot."""
    if call.arguments.get("padding", SKIPPED) == SKIPPED:
        return None
    return f"padding is {call['padding']}, it walks the slots that counts name and needs padding skipped"


def takes_charged(call: Call) -> str | None:
    """Requirement of a route whose rows must sum to the padded total."""
    if call.arguments.get("padding", SKIPPED) == CHARGED:
        return None
    return "padding is skipped, its rows must sum to the padded total: it needs padding charged to the last expert"


@dataclass(frozen=True, eq=False)
class ExpertRows:
    """Rows of an item and their order by expert (F2): one source of truth, and all of it on the device.

    Slots of expert e are ``offsets[e] .. offsets[e] + counts[e]``, in the order (source rank, token, choice).
    Nothing outside them is ever read (F3): gaps, tail, rows without a slot, and their scales may hold anything.

    Args:
        rows: [R, D] payload, the carrier or float8_e4m3fn; a token once, however many local experts it has.
        scales: [R, ceil(D/128)] float32 powers of two of an fp8 payload, else None.
        index: int32 [C]: slot -> row of ``rows``; -1 in gaps and in the tail.
        weights: [C] acc: routing weight of the slot; undefined where ``index`` is -1.
        counts: int32 [E]: slots of expert e.
        offsets: int32 [E + 1]: first slot of expert e, a multiple of ``alignment``; the last one ends expert E - 1.
        total: int32 [1]: the sum of ``counts``.
        slots: int32 [R, k]: (row, choice) -> slot, or -1 where the choice is not an expert here.
        alignment: of the first slot of an expert.

    Views of memory that its maker owns: valid until the maker's next call of the same kind.
    """

    rows: torch.Tensor
    scales: torch.Tensor | None
    index: torch.Tensor
    weights: torch.Tensor
    counts: DeviceValue
    offsets: DeviceValue
    total: DeviceValue
    slots: torch.Tensor
    alignment: int = 1
