"""Between carriers and the bytes of packed rows."""

from __future__ import annotations

import torch

from halma.hal.workspace import Workspace
from halma.ops.quant import (
    E4M3_FLOOR,
    E4M3_LIMIT,
    KV_BLOCK,
    accumulator,
    decode_fp4_blocks,
    decode_fp8_blocks,
    encode_fp4_blocks,
    encode_fp8_blocks,
    scaled,
    unscale,
)
from halma.ops.row_store import INDEX_FP4, KV_FP8, RowStore
from halma.ops.weight import FP4_BLOCK


def encode_rows(rows: torch.Tensor, store: RowStore, ws: Workspace) -> tuple[torch.Tensor, torch.Tensor]:
    """rows [N, width] of any carrier -> scratch: uint8 [N, data_bytes], uint8 [N, scale_bytes] of a packed store."""
    count = rows.shape[0]
    data = ws.take((count, store.layout.data_bytes), torch.uint8)
    scales = ws.take((count, store.layout.scale_bytes), torch.uint8)
    if store.format == INDEX_FP4:
        encode_fp4_blocks(rows, FP4_BLOCK, data, scales, ws)
    elif store.format == KV_FP8:
        _encode_kv(rows, store, data, scales, ws)
    else:
        values, scale = scaled(rows, store.width, E4M3_LIMIT, E4M3_FLOOR, ws)
        data.view(torch.float8_e4m3fn).copy_(values)
        scales.view(torch.float32).copy_(scale)
    return data, scales


def _encode_kv(rows: torch.Tensor, store: RowStore, data: torch.Tensor, scales: torch.Tensor, ws: Workspace) -> None:
    head = store.width - store.tail
    blocks = -(-head // KV_BLOCK)
    if blocks < scales.shape[-1]:
        scales[:, blocks:].zero_()
    encode_fp8_blocks(rows[:, :head], KV_BLOCK, data[:, :head], scales[:, :blocks], ws)
    if not store.tail:
        return
    data[:, head:].view(torch.bfloat16).copy_(rows[:, head:])


def decode_rows(data: torch.Tensor, scales: torch.Tensor, store: RowStore, out: torch.Tensor, ws: Workspace) -> None:
    """data uint8 [.., data_bytes], scales uint8 [.., scale_bytes] -> out [.., width], any carrier.

    fp32 and fp64 hold every stored value exactly. Bytes that nobody wrote may decode to NaN.
    """
    if store.format == INDEX_FP4:
        decode_fp4_blocks(data, scales, FP4_BLOCK, out, ws)
    elif store.format == KV_FP8:
        head = store.width - store.tail
        decode_fp8_blocks(data[..., :head], scales[..., : -(-head // KV_BLOCK)], KV_BLOCK, out[..., :head], ws)
        if store.tail:
            out[..., head:].copy_(data[..., head:].view(torch.bfloat16))
    else:
        dtype = accumulator(out.dtype)
        values = out if out.dtype == dtype else ws.take(out.shape, dtype)
        values.copy_(data.view(torch.float8_e4m3fn))
        unscale(values, scales.view(torch.float32), store.width, out, ws)
