"""Calls of the CUDA driver through cuda.bindings, with errors that name the call.

Everything here needs a context that is current on the calling thread: :func:`ensure_context`.
"""

from __future__ import annotations

import threading
from typing import Any

import torch

from halma.backends.cuda.probing import kernels_missing, missing_packages


class DriverError(RuntimeError):
    """A driver call that failed. ``code`` is its CUresult; ``call`` the function's name."""

    def __init__(self, call: str, code: int, text: str) -> None:
        super().__init__(f"{call} answers error {code}: {text}")
        self.call = call
        self.code = code


def why_missing() -> str | None:
    """Why driver calls cannot be made, or None."""
    missing = missing_packages()
    return kernels_missing(missing) if missing else None


_bindings: Any = None


def bindings() -> Any:
    """The module ``cuda.bindings.driver``, imported at first use."""
    global _bindings
    if _bindings is None:
        from cuda.bindings import driver  # pyright: ignore[reportMissingImports]

        _bindings = driver
    return _bindings


def call(name: str, *args: Any) -> Any:
    """The results of a driver function: None, one value, or a tuple of them.

    Raises:
        DriverError: it failed.
    """
    code, *results = getattr(bindings(), name)(*args)
    if code != 0:
        raise DriverError(name, int(code), _text_of(code))
    return results[0] if len(results) == 1 else tuple(results) or None


def launch(configuration: Any, function: Any, parameters: int) -> None:
    """``cuLaunchKernelEx``, without what :func:`call` adds: it is made for every kernel of every eager step.

    Raises:
        DriverError: it failed.
    """
    (code,) = bindings().cuLaunchKernelEx(configuration, function, parameters, 0)
    if code != 0:
        raise DriverError("cuLaunchKernelEx", int(code), _text_of(code))


def _text_of(code: Any) -> str:
    _, name = bindings().cuGetErrorName(code)
    _, text = bindings().cuGetErrorString(code)
    words = [part.decode() if isinstance(part, bytes) else str(part) for part in (name, text) if part]
    return ", ".join(words) or str(code)


# -- contexts ----------------------------------------------------------------------------------------------


class _Ready(threading.local):
    device: int | None = None


_ready = _Ready()
_contexts: dict[int, Any] = {}


def ensure_context(index: int) -> None:
    """Make the device's primary context, the one torch uses, current on this thread; 60 ns once it is.

    What this thread was made ready for is noted and not asked again: a caller who moves the thread to another device
    (``torch.cuda.set_device``) between two calls of ours moves it back before the next. Asking the driver each time
    would cost more than the note itself, on every launch.
    """
    if _ready.device == index:
        return
    torch.cuda.set_device(index)
    if why_missing() is None:
        context = _contexts.get(index)
        if context is None:
            call("cuInit", 0)
            context = _contexts[index] = call("cuDevicePrimaryCtxRetain", call("cuDeviceGet", index))
        call("cuCtxSetCurrent", context)
    _ready.device = index


# -- graphs ------------------------------------------------------------------------------------------------


def is_capturing(stream: int) -> bool:
    """Whether the stream of this handle takes part in a capture, an invalidated one included."""
    return int(call("cuStreamIsCapturing", bindings().CUstream(stream))) != 0


def graph_nodes(graph: int) -> list[Any]:
    """The nodes of a graph, by its handle."""
    handle = bindings().CUgraph(graph)
    _, count = call("cuGraphGetNodes", handle, 0)
    return list(call("cuGraphGetNodes", handle, count)[0])[:count] if count else []


def node_kinds(graph: int) -> list[str]:
    """KERNEL, MEMCPY, MEMSET and so on, one a node."""
    return [call("cuGraphNodeGetType", node).name.removeprefix("CU_GRAPH_NODE_TYPE_") for node in graph_nodes(graph)]
