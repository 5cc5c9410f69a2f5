"""What is being captured on this thread, if anything.

Apart from the scope so that op dispatch, which asks on every opaque launch, imports nothing else.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch


class Recorder(Protocol):
    """A graph driver that files work as nodes itself, because no hardware stream does it for us."""

    def record_node(
        self,
        name: str,
        launch: Callable[[], None],
        *,
        reads: Sequence[torch.Tensor],
        writes: Sequence[torch.Tensor],
    ) -> None:
        """Append one opaque node that runs ``launch`` at replay; nothing runs now."""
        ...


class _State(threading.local):
    recorder: Recorder | None = None


_state = _State()


def current_recorder() -> Recorder | None:
    """The recorder that is open on this thread; None in eager code and on backends that record by stream."""
    return _state.recorder


def set_current_recorder(recorder: Recorder | None) -> None:
    """For graph drivers only: publish or withdraw the open recorder."""
    _state.recorder = recorder
