"""Every variant by name."""

from __future__ import annotations

from halma.hal.testing.protocol.cases import Variant
from halma.hal.testing.protocol.proved import PROVED
from halma.hal.testing.protocol.refuted import REFUTED

VARIANTS = PROVED + REFUTED


def variant(name: str) -> Variant | None:
    """The variant of that name."""
    return next((one for one in VARIANTS if one.name == name), None)
