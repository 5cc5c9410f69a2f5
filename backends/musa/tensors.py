"""Tensors of torch_musa over memory that is not its allocator's."""

from __future__ import annotations

from typing import Any

import torch

from halma.backends.musa.seam import torch_musa


def tensor_at(address: int, nbytes: int, device: torch.device, owner: object = None) -> torch.Tensor:
    """uint8 [nbytes] on ``device`` over memory at ``address``; ``owner`` lives as long as the storage.

    torch_musa reads no array interface, so the storage is made from the address, as torch_musa's own graph trees do.
    """
    storage: Any = torch._C._construct_storage_from_data_pointer(address, device, nbytes)
    storage.halma_owner = owner  # torch keeps a storage's Python object while any tensor uses the storage
    geometry = {"dtype": torch.uint8, "size": (nbytes,), "stride": (1,), "storage_offset": 0}
    return torch_musa()._MUSAC._construct_MUSA_Tensor_From_Storage_And_Metadata(geometry, storage)
