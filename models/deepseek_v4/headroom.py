"""Device memory that a backend wants free beside a program: is there as much?"""

from __future__ import annotations

from collections.abc import Sequence

from halma.hal.backend import Backend
from halma.hal.errors import ModelError
from halma.hal.policy import Kept
from halma.models.deepseek_v4.sizing import human


def need_headroom(backend: Backend, kept: Sequence[Kept], when: str) -> None:
    """Whether the device has as many free bytes as ``kept`` says. Nothing is asked of it where that is none.

    The ranks' arena is not among them: it is made before the model is loaded, so free memory is without it.

    Raises:
        ModelError: it has not; names each part.
    """
    wanted = sum(one.nbytes for one in kept)
    free = backend.device.memory_info().free if wanted else 0
    if free >= wanted:
        return
    raise ModelError(
        "the memory that this program's kernels take as they run is not free",
        asked=[f"{one.name}: {one.reason}" for one in kept if one.nbytes],
        found=f"free device memory: {human(free)} where {when}; to stay free: {human(wanted)}",
        do="give fewer pages, a smaller chunk or context, fewer captured sizes, or more ranks",
    )
