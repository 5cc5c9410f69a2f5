"""Bootstrap over a vendor's library in torch.distributed, and channels of the kernels that vendors share."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from halma.hal.errors import CapabilityError

if TYPE_CHECKING:
    from halma.hal.collectives.contract import ChannelDriver, ChannelSite
    from halma.hal.collectives.exchange_contract import ExchangeDriver, ExchangeSite
    from halma.hal.collectives.exchange_geometry import Geometry
    from halma.hal.collectives.ring_contract import RingDriver, RingSite

_CHANNELS = "halma.backends.simt.channel"
_RINGS = "halma.backends.simt.rings"


class TorchCollectives:
    """torch.distributed over the vendor's library for the bootstrap, our own kernels for the messages.

    Args:
        backend: whose kernels and memory channels use.
        torch_backend: name of the library in torch.distributed.
        no_library: why this torch has no such library, or None; asked where there is torch.distributed at all.
    """

    def __init__(self, backend: Any, torch_backend: str, no_library: Callable[[], str | None]) -> None:
        self._backend = backend
        self.torch_backend = torch_backend
        self._no_library = no_library

    def unsupported(self) -> str | None:
        """Why there are no collectives here, or None."""
        return self.no_bootstrap() or self._backend.kernels.unsupported()

    def torch_backend_there(self) -> bool:
        """Whether this torch has the library."""
        return self.no_bootstrap() is None

    def no_bootstrap(self) -> str | None:
        """Why ranks cannot even meet, or None."""
        import torch.distributed as distributed

        if not distributed.is_available():
            return "this torch was built without torch.distributed"
        return self._no_library()

    def channel(self, site: ChannelSite) -> ChannelDriver:
        """The driver of one channel.

        Raises:
            CapabilityError: kernels are not supported here, or the kernels of channels are not part of this halma.
        """
        return self._driver(_CHANNELS, f"a channel at {site}", lambda module: module.SimtChannel(site, self._backend))

    def rings(self, site: RingSite) -> RingDriver:
        """The driver of this rank's ends of rings.

        Raises:
            CapabilityError: as :meth:`channel`.
        """
        mapped = self._backend.memory.mapped
        return self._driver(_RINGS, "rings", lambda module: module.SimtRings(site, self._backend, mapped))

    def _driver(self, name: str, asked: str, make: Callable[[Any], Any]) -> Any:
        reason = self._backend.kernels.unsupported()
        if reason is None:
            try:
                return make(importlib.import_module(name))
            except ModuleNotFoundError as error:
                if error.name is None or not name.startswith(error.name):
                    raise
                reason = f"{name} is not part of this installation"
        raise CapabilityError(
            f"the {self._backend.name} backend has no channel driver", asked=asked, found=reason,
            do="use torch.distributed's own collectives",
        )  # fmt: skip

    def exchange_blocks(self, size: int) -> int:
        """Most blocks of a grid of which two fit the device (C16)."""
        from halma.backends.simt import exchange

        return exchange.exchange_blocks(size, self._backend.capabilities)

    def no_exchange(self, geometry: Geometry) -> str | None:
        """Why the kernels cannot do this geometry here, or None."""
        from halma.backends.simt import exchange

        return self._backend.kernels.unsupported() or exchange.no_exchange(geometry, self._backend.capabilities)

    def exchange(self, site: ExchangeSite) -> ExchangeDriver:
        """The driver of one exchange."""
        from halma.backends.simt import exchange

        return exchange.SimtExchange(site, self._backend)
