"""A layout in numpy, pair by pair, and cases for the grouped ops."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from halma.hal.collectives.expert_rows import slot_capacity

Ints = np.ndarray[Any, np.dtype[np.int64]]


@dataclass
class Layout:
    """What ``expert_layout`` must give; numpy, int64."""

    index: Ints
    weights: Any
    counts: Ints
    offsets: Ints
    slots: Ints


def plain_layout(ids: Any, weights: Any, first: int, experts: int, alignment: int) -> Layout:
    """Written without a sort: experts in turn, each taking its pairs in the order they come."""
    rows, choices = ids.shape
    capacity = slot_capacity(rows * choices, experts, alignment)
    index = np.full(capacity, -1)
    taken = np.zeros(capacity, weights.dtype)
    counts, offsets, slots = np.zeros(experts, int), np.zeros(experts + 1, int), np.full(rows * choices, -1)
    flat, values = ids.reshape(-1), weights.reshape(-1)
    slot = 0
    for expert in range(experts):
        pairs = np.flatnonzero(flat == first + expert)
        offsets[expert], counts[expert] = slot, len(pairs)
        index[slot : slot + len(pairs)] = pairs // choices
        taken[slot : slot + len(pairs)] = values[pairs]
        slots[pairs] = np.arange(slot, slot + len(pairs))
        slot += -(-len(pairs) // alignment) * alignment
    offsets[experts] = slot
    return Layout(index, taken, counts, offsets, slots.reshape(rows, choices))


def compare_layout(found: tuple[torch.Tensor, ...], ids: torch.Tensor, weights: torch.Tensor, *how: int) -> None:
    """Fails where ``found`` differs from the plain layout in anything that may be read."""
    wanted = plain_layout(ids.numpy(), weights.numpy(), *how)
    index, slot_weights, counts, offsets, slots = (tensor.numpy() for tensor in found)
    for name, mine, theirs in (
        ("counts", counts, wanted.counts),
        ("offsets", offsets, wanted.offsets),
        ("index", index, wanted.index),
        ("slots", slots, wanted.slots),
    ):
        np.testing.assert_array_equal(mine, theirs, err_msg=name)
    real = wanted.index >= 0
    np.testing.assert_array_equal(slot_weights[real], wanted.weights[real], err_msg="weights")
