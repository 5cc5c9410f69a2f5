"""The compressor: every token leaves a value and a gate, every complete block becomes one row.

State is kept by absolute position, not shifted: a rejected token is overwritten by the next one at its position
before anything reads it. Shift-copied state loses that (public reports of wrong state after partial acceptance:
vllm-project/vllm-ascend#9111).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from halma.hal.dispatch import Spec, like, op
from halma.hal.errors import DispatchError, ModelError
from halma.hal.workspace import Workspace


@dataclass(frozen=True, eq=False, repr=False)
class CompressorState:
    """Values and gates of recent tokens, each [slots + 1, ring, width], fp32 or fp64; slot 0 is the null slot.

    Position p lies in row ``p % ring``. With T tokens a step the ring holds ``ratio + T`` rows at least, or
    ``2 * ratio + T`` where blocks overlap. ``width`` is twice the row's where blocks overlap.

    Raises:
        ModelError: the two tensors differ in shape or dtype, or are not contiguous fp32 or fp64.
    """

    values: torch.Tensor
    gates: torch.Tensor
    plan_key: str = field(init=False)
    """Shape and dtype; states with equal keys share a plan."""

    def __repr__(self) -> str:
        return f"CompressorState({self.plan_key})"  # never the values: printing reads the device

    def __post_init__(self) -> None:
        a, b = self.values, self.gates
        if (
            a.shape != b.shape
            or a.dtype != b.dtype
            or a.dtype not in (torch.float32, torch.float64)
            or a.dim() != 3
            or not (a.is_contiguous() and b.is_contiguous())
        ):
            raise ModelError(
                "values and gates of a compressor do not fit one another",
                asked="two contiguous fp32 or fp64 tensors [slots + 1, ring, width]",
                found=(f"values {a.dtype} {list(a.shape)}", f"gates {b.dtype} {list(b.shape)}"),
            )
        name = str(a.dtype).removeprefix("torch.")
        object.__setattr__(self, "plan_key", f"partial:{name}{list(a.shape)}@{a.device.type}")

    @property
    def ring(self) -> int:
        """Positions that a slot remembers."""
        return self.values.shape[1]


@op("compressor_insert")
def compressor_insert(
    values: torch.Tensor,
    gates: torch.Tensor,
    ape: torch.Tensor,
    positions: torch.Tensor,
    row_slot: torch.Tensor,
    state: CompressorState,
    *,
    ws: Workspace,
) -> None:
    """values, gates [M, w], ape [ratio, w], positions, row_slot [M] -> ring rows: value, gate + ape[p % ratio].

    Raises:
        DispatchError: widths differ.
    """
    check_insert(values, gates, ape, state)
    width = state.values.shape[2]
    place = torch.remainder(positions, state.ring, out=ws.take(positions.shape, torch.int64))
    place.add_(row_slot, alpha=state.ring)
    state.values.view(-1, width).index_copy_(0, place, values)
    phase = torch.remainder(positions, ape.shape[0], out=ws.take(positions.shape, torch.int64))
    bias = torch.index_select(ape, 0, phase, out=ws.take(gates.shape, ape.dtype))
    gated = torch.add(gates, bias, out=ws.take(gates.shape, state.gates.dtype))
    state.gates.view(-1, width).index_copy_(0, place, gated)


def check_insert(values: torch.Tensor, gates: torch.Tensor, ape: torch.Tensor, state: CompressorState) -> None:
    """Refuse rows that do not fit the state.

    Raises:
        DispatchError: widths differ.
    """
    width = state.values.shape[2]
    if not values.shape[1] == gates.shape[1] == ape.shape[1] == width:
        raise DispatchError(
            "compressor_insert: widths differ",
            asked=f"values {list(values.shape)}, gates {list(gates.shape)}, ape {list(ape.shape)}",
            found=f"a state of width {width}",
        )


def _pool_outputs(
    state: CompressorState,
    start: torch.Tensor,
    count: torch.Tensor,
    slot: torch.Tensor,
    ratio: int,
    overlap: bool,
    query_len: int,
    out_dtype: torch.dtype,
) -> tuple[Spec, Spec]:
    halves = 2 if overlap else 1
    width = state.values.shape[2]
    if width % halves or state.ring < ratio * halves + query_len - 1:
        raise DispatchError(
            "compressor_pool: the state is too small",
            asked=f"steps of {query_len} tokens, ratio {ratio}{', overlapping' if overlap else ''}",
            found=f"a ring of {state.ring} positions, width {width}",
            do=f"give a ring of at least {ratio * halves + query_len - 1} positions",
        )
    rows = slot.shape[0] * -(-query_len // ratio)
    return Spec((rows, width // halves), out_dtype), Spec((rows,), torch.int64)


@op("compressor_pool", out=_pool_outputs)
def compressor_pool(
    state: CompressorState,
    start: torch.Tensor,
    count: torch.Tensor,
    slot: torch.Tensor,
    ratio: int,
    overlap: bool,
    query_len: int,
    out_dtype: torch.dtype,
    *,
    out: tuple[torch.Tensor, torch.Tensor],
    ws: Workspace,
) -> None:
    """Blocks that the step completes -> pooled [R*nb, d] in ``out_dtype``, block [R*nb] i64, nb = ceil(T / ratio).

    Candidate j of request r is block ``w = start // ratio + j``. It is complete if ``(w + 1) * ratio <= start +
    count``; otherwise its number is -1 and its row means nothing. Per channel a block is the softmax of its
    tokens' gates times their values; with ``overlap`` over the previous block's tokens too, those with the first
    half of their channels, the block's own with the second. Block 0 has no previous block.

    Args:
        start, count, slot: int64 [R].

    Raises:
        DispatchError: the ring cannot hold a step of ``query_len`` tokens (found when planning).
    """
    pooled, block = out
    slots = slot.shape[0]
    blocks = block.view(slots, -1)
    _complete_blocks(start, count, ratio, blocks, ws)
    halves = 2 if overlap else 1
    items, steps, width = block.shape[0], halves * ratio, pooled.shape[1]
    place = ws.take((slots, blocks.shape[1], steps), torch.int64)
    missing = _slot_places(blocks, slot, ratio, overlap, state.ring, place, ws)
    dtype = state.values.dtype
    values, gates = ws.take((items, steps, width), dtype), ws.take((items, steps, width), dtype)
    # A token's two halves are two rows of this view, so only the half that is needed is read.
    torch.index_select(state.values.view(-1, width), 0, place.view(-1), out=values.view(-1, width))
    torch.index_select(state.gates.view(-1, width), 0, place.view(-1), out=gates.view(-1, width))
    if missing is not None:
        gates.masked_fill_(missing.view(items, steps, 1), float("-inf"))
    _softmax_sum(values, gates, pooled, ws)


def _complete_blocks(start: torch.Tensor, count: torch.Tensor, ratio: int, blocks: torch.Tensor, ws: Workspace) -> None:
    """-> blocks [R, nb]: the candidates' numbers, -1 for those that are not complete."""
    first = torch.floor_divide(start, ratio, out=ws.take(start.shape, torch.int64)).unsqueeze(1)
    step = ws.take((blocks.shape[1],), torch.int64)
    torch.arange(blocks.shape[1], out=step)
    torch.add(first, step, out=blocks)
    known = torch.add(start, count, out=ws.take(start.shape, torch.int64)).floor_divide_(ratio)
    open_ = torch.ge(blocks, known.unsqueeze(1), out=ws.take(blocks.shape, torch.bool))
    blocks.masked_fill_(open_, -1)


def _slot_places(
    blocks: torch.Tensor,
    slot: torch.Tensor,
    ratio: int,
    overlap: bool,
    ring: int,
    place: torch.Tensor,
    ws: Workspace,
) -> torch.Tensor | None:
    """-> place [R, nb, steps]: (half) rows of the state for each block; returns where there is no token, or None.

    Counted in half rows where blocks overlap: token t's halves are 2t and 2t + 1, so the doubled positions of a
    block are two arithmetic rows. A missing token (of the block before block 0) reads position 0, which the same
    block holds: it is finite whenever the block is, and its weight is zero.
    """
    unit = 2 if overlap else 1
    steps = ws.take((place.shape[2],), torch.int64)
    if overlap:
        torch.arange(-2 * ratio, 0, 2, out=steps[:ratio])
        torch.arange(1, 2 * ratio, 2, out=steps[ratio:])
    else:
        torch.arange(ratio, out=steps)
    torch.add(steps, blocks.unsqueeze(2), alpha=unit * ratio, out=place)
    missing = torch.lt(place, 0, out=ws.take(place.shape, torch.bool)) if overlap else None
    place.clamp_min_(0).remainder_(unit * ring).add_(slot.view(-1, 1, 1), alpha=unit * ring)
    return missing


def _softmax_sum(values: torch.Tensor, gates: torch.Tensor, out: torch.Tensor, ws: Workspace) -> None:
    """values, gates [N, S, d] -> out [N, d]: softmax over S, weighted sum, one rounding at the end.

    Written out, with S innermost: torch's sums over an outer dimension give other bits to the channels behind the
    last full vector, and where that is depends on N (K7).
    """
    items, steps, width = gates.shape
    top = torch.amax(gates, 1, keepdim=True, out=ws.take((items, 1, width), gates.dtype))
    turned = ws.take((items, width, steps), gates.dtype)
    torch.sub(gates.transpose(1, 2), top.transpose(1, 2), out=turned)
    turned.exp_()
    total = torch.sum(turned, -1, out=ws.take((items, width), gates.dtype))
    turned.mul_(values.transpose(1, 2))
    mixed = out if out.dtype == gates.dtype else ws.take(out.shape, gates.dtype)
    torch.sum(turned, -1, out=mixed)
    mixed.div_(total)
    if mixed is not out:
        out.copy_(mixed)


@op("block_positions", out=lambda block, ratio: like(block))
def block_positions(block: torch.Tensor, ratio: int, *, out: torch.Tensor, ws: Workspace) -> None:
    """block [N] i64 -> [N] i64: the position of the block's first token, where its row is rotated to; 0 for -1.

    Not the block's number: rotating to that is a known trap (AMD-AGI/Primus#930).
    """
    torch.clamp_min(block, 0, out=out).mul_(ratio)
