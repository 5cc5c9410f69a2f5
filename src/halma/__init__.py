"""halma: DeepSeek-V4's decode, MTP and FFN paths, written once, over a hardware abstraction layer."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from halma.hal.backend import Backend

__version__ = "0.1.0"
__all__ = ["__version__", "backend"]


def backend(name: str | None = None) -> Backend:
    """The backend called ``name``, else ``HALMA_BACKEND``, else the one usable accelerator.

    Raises:
        BackendError: none, several or an unusable one; the message lists every reason.
    """
    from halma.hal.registry import default_registry

    return default_registry().select(name)
