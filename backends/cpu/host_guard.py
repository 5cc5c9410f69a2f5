"""Refuses reads of device values on the host while a graph is captured.

On a CPU tensor ``tolist``, ``numpy``, ``cpu`` or ``data_ptr`` never reach the dispatcher: the value is simply
there. A torch function mode sees them by name. What does reach the dispatcher (``item`` as
``_local_scalar_dense``, ``nonzero``, masks) is refused by the recorder, which asks this guard what called.

Out of reach of both: ``torch.utils.dlpack.to_dlpack``, ``torch.frombuffer``, and the pointer of a storage.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch.overrides import TorchFunctionMode

from halma.backends.cpu.lines import program_line
from halma.hal.errors import HostReadError

_USE_A_ROUTE = "keep the value on the device: pass the tensor to an op, or use its declared bound for shapes"
_MOVE_OUT = "do it before the capture, or after the replay"

_READS = {
    name: (f"{shown} reads a device value on the host", _USE_A_ROUTE)
    for name, shown in {
        "item": "Tensor.item()",
        "tolist": "Tensor.tolist()",
        "numpy": "Tensor.numpy()",
        "__array__": "numpy.asarray(tensor)",
        "cpu": "Tensor.cpu()",
        "__bool__": "bool(tensor)",
        "__int__": "int(tensor)",
        "__float__": "float(tensor)",
        "__complex__": "complex(tensor)",
        "__index__": "a tensor used as an index or size",
        "__contains__": "value in tensor",
        "__repr__": "printing a tensor",
        "__str__": "printing a tensor",
        "__format__": "formatting a tensor",
        "is_nonzero": "torch.is_nonzero()",
    }.items()
}
_OTHERS = {
    "data_ptr": (
        "Tensor.data_ptr() bakes an address into the graph",
        "pass the tensor itself; a kernel asks at launch",
    ),
    "__dlpack__": ("DLPack export gives the device's memory to someone the graph does not know", _MOVE_OUT),
    "__deepcopy__": ("copy.deepcopy(tensor) copies through the host", _MOVE_OUT),
    "__reduce_ex__": ("pickling a tensor reads it on the host", _MOVE_OUT),
    "share_memory_": ("Tensor.share_memory_() moves a tensor's memory", _MOVE_OUT),
    "pin_memory": ("Tensor.pin_memory() allocates and copies on the host", _MOVE_OUT),
}
_REFUSED = {**_READS, **_OTHERS}

_FROM_HOST = frozenset({"tensor", "as_tensor", "asarray", "new_tensor", "scalar_tensor"})
_BAKES = "bakes a value of the host into the graph"
_USE_A_SCALAR = (
    "pass the number to the op as it is, fill workspace memory with it (fill_), or make the tensor before the "
    "capture and refresh it"
)


class HostGuard(TorchFunctionMode):
    """The function mode; the recorder shares it.

    Args:
        fail: told of every refusal, so that a program that catches it cannot hide it (G3).
    """

    def __init__(self, fail: Callable[[BaseException], None]) -> None:
        super().__init__()
        self._fail = fail
        self.calling = ""

    def refuse(self, what: str, do: str) -> NoReturn:
        """Raise for the program line that asked.

        Raises:
            HostReadError: always.
        """
        error = HostReadError(f"{what}, inside a capture", found=f"at {program_line()}", do=do)
        self._fail(error)
        raise error

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in _REFUSED:
            self.refuse(*_REFUSED[name])
        if name == "to" and "cpu" in (*args[1:], kwargs.get("device")):
            # A device object may be another tensor's own device, where nothing moves; the name is a request.
            self.refuse("Tensor.to('cpu') reads a device value on the host", _USE_A_ROUTE)
        if name in _FROM_HOST and not (args[-1:] and isinstance(args[-1], torch.Tensor) and name != "new_tensor"):
            self.refuse(f"torch.{name}() {_BAKES}", _USE_A_SCALAR)
        if name == "tensor_split" and any(isinstance(value, torch.Tensor) for value in (*args[1:], *kwargs.values())):
            self.refuse("tensor_split() with a tensor reads it on the host", _USE_A_ROUTE)
        if name == "__set__" and getattr(func, "__self__", None) is torch.Tensor.data:
            self.refuse("tensor.data = ... gives a tensor other memory, and a graph keeps the old address", _MOVE_OUT)
        outer, self.calling = self.calling, name
        try:
            if name == "one_hot":
                return _one_hot(*args, **kwargs)
            return func(*args, **kwargs)
        finally:
            self.calling = outer


def _one_hot(tensor: torch.Tensor, num_classes: int = -1) -> torch.Tensor:
    """As torch's, without its range check on the CPU, which reads the values; with -1 it must read them."""
    if num_classes <= 0:
        return torch.nn.functional.one_hot(tensor, num_classes)
    out = torch.zeros((*tensor.shape, num_classes), dtype=torch.int64)
    return out.scatter_(-1, tensor.unsqueeze(-1), 1)
