"""The arithmetic of an exchange in plain PyTorch, without a host read: slots by expert, rows as fp8, sums of choices.

What drivers without kernels use, and what the words mean to those with kernels.
"""

from __future__ import annotations

from itertools import pairwise

import torch

from halma.hal.collectives.arithmetic import E4M3_FLOOR, E4M3_LIMIT, FP8_GROUP
from halma.hal.collectives.exchange_contract import Layout


def lay_out(
    ids: torch.Tensor, weights: torch.Tensor, rows: torch.Tensor, first: int, experts: int, alignment: int, out: Layout
) -> None:
    """Slots of this rank's experts, stable in the order of the pairs.

    Args:
        ids: int64 [N, k], experts of all ranks; anything outside ``first .. first + experts`` has no slot.
        weights: acc [N, k].
        rows: int64 [N]: the row of each token.
        out: everything but ``tokens`` and ``sources`` is written; of ``slots`` only these rows.
    """
    choices = ids.shape[1]
    local = ids.reshape(-1) - first
    key = torch.where((local >= 0) & (local < experts), local, experts)
    # One more of everything: pairs without an expert here are counted, placed and then cut off.
    counts = torch.zeros(experts + 1, dtype=torch.int64, device=ids.device)
    counts.scatter_add_(0, key, torch.ones_like(key))
    room = torch.div(counts + (alignment - 1), alignment, rounding_mode="floor") * alignment
    starts = torch.cumsum(room, 0) - room
    order = torch.argsort(key, stable=True)
    sorted_key = key[order]
    place = torch.arange(key.shape[0], device=ids.device) - (torch.cumsum(counts, 0) - counts)[sorted_key]
    slot = torch.empty_like(key)
    slot[order] = torch.where(sorted_key < experts, starts[sorted_key] + place, -1)
    capacity = out.index.shape[0]
    index = torch.full((capacity + 1,), -1, dtype=torch.int32, device=ids.device)
    target = torch.where(slot >= 0, slot, capacity)
    index.scatter_(0, target, rows.repeat_interleave(choices).to(torch.int32))
    by_slot = torch.zeros(capacity + 1, dtype=weights.dtype, device=ids.device)
    by_slot.scatter_(0, target, weights.reshape(-1))
    out.index.copy_(index[:capacity])
    out.weights.copy_(by_slot[:capacity])
    out.counts.copy_(counts[:experts])
    out.offsets.copy_(starts)
    out.total.copy_(counts[:experts].sum().view(1))
    out.slots.index_copy_(0, rows, slot.view(-1, choices).to(torch.int32))


def empty_layout(out: Layout) -> None:
    """No slot at all: what is handed out after a fault."""
    out.index.fill_(-1)
    for tensor in (out.counts, out.offsets, out.total, out.tokens, out.sources):
        tensor.zero_()


def owners(ids: torch.Tensor, starts: list[int]) -> torch.Tensor:
    """bool [M, ranks]: whether a rank has one of a token's experts.

    Args:
        ids: int64 [M, k].
        starts: the first expert of each rank, then the number of experts.
    """
    marks = [((ids >= low) & (ids < high)).any(1) for low, high in pairwise(starts)]
    return torch.stack(marks, 1)


def as_bits(here: torch.Tensor) -> torch.Tensor:
    """bool [M, ranks] -> int32 [M], bit r for rank r."""
    values = torch.tensor([1 << rank for rank in range(here.shape[1])], dtype=torch.int32, device=here.device)
    return (here.to(torch.int32) * values).sum(1).to(torch.int32)


def to_fp8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x [M, D] -> (float8_e4m3fn [M, D], float32 powers of two [M, ceil(D / 128)]): as an fp8 product rounds its input.

    The last group may be short. A group with a NaN has a NaN for its scale.
    """
    groups = -(-x.shape[1] // FP8_GROUP)
    wide = x.float()
    padded = torch.zeros((x.shape[0], groups * FP8_GROUP), dtype=torch.float32, device=x.device)
    padded[:, : x.shape[1]] = wide
    largest = padded.view(x.shape[0], groups, FP8_GROUP).abs().amax(-1)
    scales = largest.clamp_min(E4M3_FLOOR) * (1.0 / E4M3_LIMIT)
    # Up to a power of two: carry any mantissa into the exponent, then drop the mantissa.
    scales = ((scales.view(torch.int32) + 0x7FFFFF) & 0x7F800000).view(torch.float32)
    scales = torch.where(largest.isnan(), largest, scales)
    spread = scales.repeat_interleave(FP8_GROUP, 1)[:, : x.shape[1]]
    return (wide / spread).to(torch.float8_e4m3fn), scales


def local_sums(parts: torch.Tensor, slots: torch.Tensor, acc: torch.dtype, carrier: torch.dtype) -> torch.Tensor:
    """What a rank has of tokens: 0 + part of the first choice + ..., in the order of the choices, rounded once.

    Args:
        parts: [C, D].
        slots: int32 [M, k]; -1 where a choice has no slot here. Nothing else of ``parts`` is read into the sum.

    Returns:
        carrier [M, D].
    """
    total = torch.zeros((slots.shape[0], parts.shape[1]), dtype=acc, device=parts.device)
    for choice in range(slots.shape[1]):
        slot = slots[:, choice].long()
        part = parts[slot.clamp_min(0)].to(acc)
        total = torch.where((slot >= 0).unsqueeze(1), total + part, total)
    return total.to(carrier)


def rank_sums(back: torch.Tensor, sources: torch.Tensor, out: torch.Tensor, acc: torch.dtype) -> None:
    """out [M, D] = 0 + what came from rank 0 + ..., in rank order, of the ranks in ``sources``; rounded once.

    Args:
        back: carrier [ranks, M, D]; what is not in ``sources`` may hold anything.
        sources: int32 [M], bit r for rank r.
    """
    total = torch.zeros(back.shape[1:], dtype=acc, device=back.device)
    for rank in range(back.shape[0]):
        sent = (torch.bitwise_right_shift(sources, rank) & 1).bool().unsqueeze(1)
        total = torch.where(sent, total + back[rank].to(acc), total)
    out.copy_(total)
