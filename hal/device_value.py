"""A value that lives on the device and must stay there while a program runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

from halma.hal.errors import HostReadError

if TYPE_CHECKING:
    import torch


class DeviceValue:
    """One device tensor with a declared bound: counts, positions, slots, routing.

    A program may hand it to ops and to nothing else. It has no ``item``, and ``int``, ``bool`` and
    ``index`` raise, so a branch on a run-time value cannot be written by accident (the class of bugs
    in vllm-project/vllm#52492 and #51119). It is not a Tensor subclass: a subclass costs about 4 us
    on every op that touches it.

    Args:
        tensor: the integer tensor that holds the value; its address must not change.
        bound: exclusive upper bound of every element, known on the host; shapes may use it.
        name: shown in errors.
    """

    __slots__ = ("_tensor", "bound", "name")

    def __init__(self, tensor: torch.Tensor, *, bound: int, name: str = "value") -> None:
        self._tensor = tensor
        self.bound = bound
        self.name = name

    @property
    def shape(self) -> torch.Size:
        """Shape of the value; a property of the descriptor, so the host may read it."""
        return self._tensor.shape

    def _refuse(self, how: str) -> NoReturn:
        raise HostReadError(
            f"the device value {self.name!r} was read on the host ({how})",
            asked=f"{how} of a value below {self.bound}",
            found="a program runs without the host: such a read would be frozen into its graph",
            do="use the bound for shapes, or pass the value to an op",
        )

    def __bool__(self) -> bool:
        self._refuse("bool()")

    def __int__(self) -> int:
        self._refuse("int()")

    def __index__(self) -> int:
        self._refuse("an index")

    def __float__(self) -> float:
        self._refuse("float()")

    def __iter__(self) -> NoReturn:
        self._refuse("iteration")

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True  # containers ask; it reads nothing
        self._refuse("a comparison")

    def __lt__(self, other: object) -> bool:
        self._refuse("a comparison")

    __le__ = __gt__ = __ge__ = __lt__
    __hash__ = object.__hash__

    def __repr__(self) -> str:
        return f"DeviceValue({self.name}, shape={tuple(self._tensor.shape)}, bound={self.bound})"


def unwrap(value: DeviceValue | torch.Tensor) -> torch.Tensor:
    """The tensor inside, for ops only (a syntax-tree test keeps it out of models)."""
    return value._tensor if isinstance(value, DeviceValue) else value  # pyright: ignore[reportPrivateUsage]
