"""Torch's mode stacks: entering a mode cheaply, and leaving it for certain."""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from typing import Any

from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack


class DispatchMode(TorchDispatchMode):
    """A dispatch mode that does without torch's compiler.

    Torch wraps the handler of a mode in ``torch._dynamo.disable``, so the first call imports the compiler:
    more than 500 modules, as long as importing torch itself. Nothing here is ever compiled.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


@contextlib.contextmanager
def entered(mode: TorchDispatchMode | TorchFunctionMode) -> Generator[None]:
    """``mode`` on; then off, with any mode above it that an exception left on.

    A mode's own exit takes off whatever is on top, so one that was left behind would take ours' place.
    """
    mode.__enter__()
    try:
        yield
    finally:
        for other in reversed(_stack_of(mode)):
            other.__exit__(None, None, None)
            if other is mode:
                break


def _stack_of(mode: TorchDispatchMode | TorchFunctionMode) -> list[Any]:
    """The modes from ``mode`` upwards; empty when somebody took it off."""
    modes: list[Any] = (
        _get_current_function_mode_stack()
        if isinstance(mode, TorchFunctionMode)
        else _get_current_dispatch_mode_stack()
    )
    position = next((index for index, other in enumerate(modes) if other is mode), len(modes))
    return modes[position:]
