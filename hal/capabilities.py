"""What a device can do: one frozen record, in which *unknown* is a value of its own and means off."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Final, TypeVar, final

from halma.hal.errors import CapabilityError

T = TypeVar("T")


@final
class Unknown:
    """The value of a capability that nobody has probed. It is false, and compares equal only to itself."""

    _instance: Unknown | None = None

    def __new__(cls) -> Unknown:
        if cls._instance is None:
            cls._instance = super().__new__(cls)
        return cls._instance

    def __bool__(self) -> bool:
        return False

    def __repr__(self) -> str:
        return "unknown"

    def __reduce__(self) -> str:
        return "UNKNOWN"


UNKNOWN: Final = Unknown()


@dataclass(frozen=True)
class Capabilities:
    """Facts about a device that the layer and the routes may rely on.

    Every field defaults to :data:`UNKNOWN`, which is off (B8). Declaring one that does not hold fails the
    conformance suite.
    """

    graph_capture: bool | Unknown = UNKNOWN
    """Work can be captured and replayed at all."""
    graph_segments: bool | Unknown = UNKNOWN
    """A capture may end and another begin on the same stream in the middle of a program."""
    graph_parameters: bool | Unknown = UNKNOWN
    """The host values baked into a captured graph can be listed (needed for the double-capture check)."""
    graph_executable_limit: int | None | Unknown = UNKNOWN
    """Live executables that the driver allows in a process; None: no limit known to matter."""
    graph_reinstantiate: bool | Unknown = UNKNOWN
    """A template can be instantiated again after its executable was destroyed, so executables can be recycled."""
    memory_info_exact: bool | Unknown = UNKNOWN
    """Free memory falls by exactly what this process takes, so that a capture's cost can be read from it."""
    graph_debug_dump: bool | Unknown = UNKNOWN
    """A graph can be written out for inspection."""
    thread_local_capture: bool | Unknown = UNKNOWN
    """Work of another thread does not break a capture."""
    pool_freed_by_reset: bool | Unknown = UNKNOWN
    """Destroying a graph gives its memory back."""
    warp_width: int | Unknown = UNKNOWN
    """Threads that run in lockstep."""
    remote_store_atomicity: int | Unknown = UNKNOWN
    """Bytes of the largest store to a peer's memory that is never seen in part (C19)."""
    dependent_launch: bool | Unknown = UNKNOWN
    """A kernel may be launched before the one before it has ended, and wait for it itself."""
    resident_threads: int | Unknown = UNKNOWN
    """Threads that the device holds at once: spinning grids that may run together must fit (C16)."""
    stream_mixing: bool | Unknown = UNKNOWN
    """A channel's all-reduce can end in mixed residual streams (:mod:`halma.hal.collectives.mixing`)."""
    ipc: bool | Unknown = UNKNOWN
    """Device memory can be opened by another process of this machine."""
    fp8_e4m3fn: bool | Unknown = UNKNOWN
    """The fp8 type is OCP e4m3fn (0x80 is minus zero, not NaN: vllm-project/vllm#52109)."""
    float64: bool | Unknown = UNKNOWN
    """Double precision works."""
    row_invariant: bool | Unknown = UNKNOWN
    """A row's bits do not depend on the rows beside it (K7)."""
    triton_target: str | None | Unknown = UNKNOWN
    """The target's name in Triton; None: Triton is not used."""
    collective_backend: str | None | Unknown = UNKNOWN
    """The torch.distributed backend that bootstraps collectives."""

    def need(self, name: str, *, for_: str) -> Any:
        """The value of a capability that ``for_`` cannot do without.

        Raises:
            CapabilityError: it is unknown or off.
        """
        value = getattr(self, name)
        if isinstance(value, Unknown) or value is False:
            raise CapabilityError(
                f"{for_} needs the capability {name!r}",
                found=f"{name} is {value}" + (" (unknown counts as off)" if isinstance(value, Unknown) else ""),
                do="halma doctor shows what was probed; declare it in the backend's capabilities once it is true",
            )
        return value

    def as_json(self) -> dict[str, Any]:
        """Field name to value; unknown becomes the string ``"unknown"``."""
        return {
            f.name: "unknown" if isinstance(getattr(self, f.name), Unknown) else getattr(self, f.name)
            for f in fields(self)
        }
