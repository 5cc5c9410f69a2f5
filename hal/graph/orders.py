"""Orders of capture. None of them may matter (G17); a test captures in all of them."""

from __future__ import annotations

import random
import re
from collections.abc import Iterable
from typing import Final

from halma.hal.errors import CaptureError
from halma.hal.graph.descriptor import Descriptor

ORDERS: Final = ("descending", "ascending", "shuffled(SEED)")
_SHUFFLED = re.compile(r"shuffled\((\d+)\)")


def ordered(descriptors: Iterable[Descriptor], order: str) -> list[Descriptor]:
    """``descriptors`` in an order of :data:`ORDERS`; the same on every rank and machine.

    Raises:
        CaptureError: no such order.
    """
    ascending = sorted(descriptors, key=lambda d: (d.num_tokens, d.context_capacity, d))
    if order == "ascending":
        return ascending
    if order == "descending":
        return ascending[::-1]
    seed = _SHUFFLED.fullmatch(order)
    if seed is None:
        raise CaptureError(
            f"no order of capture called {order!r}",
            asked=f"--order {order}",
            found="known: " + ", ".join(ORDERS),
            do="--order descending, or --order 'shuffled(7)'",
        )
    random.Random(int(seed[1])).shuffle(ascending)
    return ascending
