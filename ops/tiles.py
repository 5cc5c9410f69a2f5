"""Products of each row with its own keys, in tiles of fixed shape so that bits depend on neither rows nor length."""

from __future__ import annotations

import torch

ROWS = 16
"""Rows done at a time by ops that gather keys a row: bounds scratch, and does not depend on the context."""


def tile_products(left: torch.Tensor, right: torch.Tensor, out: torch.Tensor, scale: float = 1.0) -> None:
    """left [M, a, b], right [tiles, M, b, c] -> out [tiles, M, a, c], each item the product times ``scale``.

    Every item is one [a, b] . [b, c] product whatever M and the number of tiles are; a batch of those has the
    same bits however long it is (K7). The batch runs over the longer of the two dimensions, so one row takes one call.
    """
    tiles, rows = right.shape[:2]
    if rows <= tiles:
        for row in range(rows):
            target = out[:, row]
            shared = left[row].expand(tiles, -1, -1)
            torch.baddbmm(target, shared, right[:, row], beta=0, alpha=scale, out=target)
    else:
        for tile in range(tiles):
            target = out[tile]
            torch.baddbmm(target, left, right[tile], beta=0, alpha=scale, out=target)
