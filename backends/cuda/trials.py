"""Trials of a CUDA device that only its driver answers."""

from __future__ import annotations

import torch

from halma.backends.cuda import driver
from halma.backends.torch_device.trials import Trials
from halma.hal.capabilities import UNKNOWN, Unknown


class CudaTrials(Trials):
    """The shared trials, and how far a peer's store can be trusted."""

    def remote_store_atomicity(self) -> int | Unknown:
        """16 bytes within one device, and between devices whose links do native atomics (NVLink): there an aligned
        vector store is one transaction. Over PCIe nobody promises it (C19)."""
        count, mine = torch.cuda.device_count(), self.device.index
        native = driver.bindings().CUdevice_P2PAttribute.CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED
        for other in range(count):
            for pair in ((mine, other), (other, mine)) if other != mine else ():
                if not driver.call("cuDeviceGetP2PAttribute", native, *pair):
                    self.notes["remote_store_atomicity"] = f"devices {pair[0]} and {pair[1]} are not linked by NVLink"
                    return UNKNOWN
        return 16
