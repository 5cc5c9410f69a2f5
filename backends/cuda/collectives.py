"""Bootstrap over NCCL, and channels of the kernels that CUDA and MUSA share."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from halma.hal.errors import CapabilityError

if TYPE_CHECKING:
    from halma.hal.collectives.contract import ChannelDriver, ChannelSite

_CHANNELS = "halma.backends.simt.channel"


class CudaCollectives:
    """torch.distributed over nccl for the bootstrap, our own kernels for the messages.

    Args:
        backend: whose kernels and memory channels use.
    """

    torch_backend = "nccl"

    def __init__(self, backend: Any) -> None:
        self._backend = backend

    def unsupported(self) -> str | None:
        """Why there are no collectives here, or None."""
        return self._no_nccl() or self._backend.kernels.unsupported()

    def torch_backend_there(self) -> bool:
        """Whether this torch has nccl."""
        return self._no_nccl() is None

    @staticmethod
    def _no_nccl() -> str | None:
        import torch.distributed as distributed

        if not distributed.is_available():
            return "this torch was built without torch.distributed"
        return None if distributed.is_nccl_available() else "this torch was built without nccl"

    def channel(self, site: ChannelSite) -> ChannelDriver:
        """The driver of one channel.

        Raises:
            CapabilityError: kernels are not supported here, or the kernels of channels are not part of this halma.
        """
        reason = self._backend.kernels.unsupported()
        if reason is None:
            try:
                return importlib.import_module(_CHANNELS).SimtChannel(site, self._backend)
            except ModuleNotFoundError as error:
                if error.name is None or not _CHANNELS.startswith(error.name):
                    raise
                reason = f"{_CHANNELS} is not part of this installation"
        raise CapabilityError(
            "the cuda backend has no channel driver", asked=f"a channel at {site}", found=reason,
            do="use torch.distributed's own collectives",
        )  # fmt: skip
