"""A launch of our own kernels into an open capture."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from halma.backends.torch_device.watch import CaptureWatch
from halma.hal.graph.current import current_recorder


def note_launch(name: str, grid: int, block: int, args: Sequence[Any]) -> None:
    """Tell the capture of this thread of a launch, with every host value that it bakes in."""
    watch = current_recorder()
    if isinstance(watch, CaptureWatch):
        values = [(f"argument {index}", getattr(value, "value", value)) for index, value in enumerate(args)]
        watch.note_launch(name, [("grid", grid), ("block", block), *values])
