"""libmusart and libmusa of the CPU simulator: functions that are called as those of a ``ctypes.CDLL``."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, Final

from halma.backends.musa.simulator import faults
from halma.backends.musa.simulator.cpu import capture as driver
from halma.backends.musa.simulator.cpu import pinned, placing
from halma.backends.musa.simulator.faults import TEXTS, SimulatedError
from halma.backends.musa.simulator.functions import Library
from halma.hal.errors import CollectiveError
from halma.hal.shared_file import SharedFile

VERSION: Final = 40300
"""Of the runtime and the driver: 4.3.0, the toolkit of torch_musa 2.7.1."""
_LENGTH: Final = 2
"""Bytes in front of a handle that say how long it is."""

ATTRIBUTES: Final = {
    1: 1024,  # threads of a block
    8: 48 << 10,  # shared memory of a block
    10: 32,  # lanes of a warp
    13: 1_700_000,  # kHz
    16: 56,  # multiprocessors
    39: 2048,  # threads of a multiprocessor
    75: 3,  # compute capability
    76: 1,
    97: 48 << 10,  # shared memory of a block, when asked for
}
"""cudaDeviceAttr -> value. Invented, but for warp width and multiprocessors, which an S5000 has."""

_MEMORY_TYPE, _ORDINAL, _IPC, _START, _SIZE = 2, 9, 10, 11, 12
"""CUpointer_attribute."""


_last = [0]
_made: dict[int, SharedFile] = {}
"""What ``musaMalloc`` gave, by address."""
_opened: dict[int, SharedFile] = {}


def _coded(body: Callable[..., None]) -> Callable[..., int]:
    def call(*args: Any) -> int:
        try:
            body(*args)
        except SimulatedError as error:
            _last[0] = error.error_code
            return error.error_code
        return 0

    return call


def _fail(code: int) -> None:
    raise SimulatedError(code)


def _get_last_error() -> int:
    code, _last[0] = _last[0], 0
    return code


def _malloc(out: Any, nbytes: int) -> None:
    driver.refuse_unsafe()
    allocator = placing.allocators[driver.current_device()]
    if nbytes > allocator.free:
        _fail(faults.OUT_OF_MEMORY)
    try:
        file = SharedFile.make(max(nbytes, 1))
    except (CollectiveError, MemoryError, OSError):
        _fail(faults.OUT_OF_MEMORY)
        return
    address = _address(file)
    allocator.reserved += file.nbytes
    _made[address] = file
    out.value = address


def _address(file: SharedFile) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(file.mapping))


def _free(address: int | None) -> None:
    driver.refuse_unsafe()
    if not address:
        return
    file = _made.pop(address, None)
    if file is None:
        _fail(faults.INVALID_VALUE)
        return
    placing.allocators[driver.current_device()].reserved -= file.nbytes
    file.close()


def _memset(address: int, value: int, nbytes: int) -> None:
    driver.refuse_unsafe()
    ctypes.memset(address, value, nbytes)


def _ipc_get(handle: Any, address: int) -> None:
    file = _made.get(address)
    if file is None:  # inside an allocation, or memory of torch's allocator, or of nobody
        _fail(faults.INVALID_VALUE)
        return
    packed = len(file.handle).to_bytes(_LENGTH, "little") + file.handle
    ctypes.memmove(handle.reserved, packed, len(packed))


def _ipc_open(out: Any, handle: Any, flags: int) -> None:
    raw = bytes(handle.reserved)
    length = int.from_bytes(raw[:_LENGTH], "little")
    packed = raw[_LENGTH : _LENGTH + length]
    if any(file.handle == packed for file in _made.values()):
        _fail(faults.INVALID_CONTEXT)  # a process cannot open its own
    try:
        file = SharedFile.open(packed, "the MUSA simulator")
    except CollectiveError:
        _fail(faults.INVALID_VALUE)
        return
    address = _address(file)
    _opened[address] = file
    out.value = address


def _ipc_close(address: int) -> None:
    file = _opened.pop(address, None)
    if file is None:
        _fail(faults.INVALID_VALUE)
        return
    file.close()


def _host_register(address: int, nbytes: int, flags: int) -> None:
    pinned.lock(address, nbytes)


def _host_unregister(address: int) -> None:
    if not pinned.unlock(address):
        _fail(faults.INVALID_VALUE)


def _host_pointer(out: Any, address: int, flags: int) -> None:
    if not pinned.holds(address, 1):
        _fail(faults.INVALID_VALUE)
    out.value = address


def _stream_create(out: Any, flags: int) -> None:
    out.value = driver.new_stream(driver.current_device()).handle


def _is_capturing(handle: int | None, out: Any) -> None:
    found = driver.stream_at(handle or 0, driver.current_device()).capture
    out.value = 0 if found is None else 2 if found.failed else 1


def _attribute(out: Any, attribute: int, device: int) -> None:
    if attribute not in ATTRIBUTES:
        _fail(faults.INVALID_VALUE)
    out.value = ATTRIBUTES[attribute]


def _version(out: Any) -> None:
    out.value = VERSION


def _pointer_attribute(out: Any, attribute: int, address: int) -> None:
    start = next((at for at, file in _made.items() if at <= address < at + file.nbytes), None)
    if start is None:
        _fail(faults.INVALID_VALUE)
        return
    answers = {_MEMORY_TYPE: 2, _ORDINAL: driver.current_device(), _IPC: 1, _START: start, _SIZE: _made[start].nbytes}
    if attribute not in answers:
        _fail(faults.INVALID_VALUE)
    where = out if isinstance(out, int) else ctypes.addressof(out)
    wide = ctypes.c_uint64 if attribute in (_START, _SIZE) else ctypes.c_uint32
    wide.from_address(where).value = answers[attribute]


def _runtime_text(which: int) -> Callable[[int], bytes]:
    return lambda code: TEXTS.get(code, ("musaErrorUnknown", "unrecognized error code"))[which].encode()


def _driver_text(which: int) -> Callable[[int, Any], int]:
    def said(code: int, out: Any) -> int:
        if code not in TEXTS:
            return faults.INVALID_VALUE
        out.value = TEXTS[code][which].encode()
        return 0

    return said


_RUNTIME: Final[dict[str, Callable[..., Any]]] = {
    "musaMalloc": _malloc,
    "musaFree": _free,
    "musaMemset": _memset,
    "musaIpcGetMemHandle": _ipc_get,
    "musaIpcOpenMemHandle": _ipc_open,
    "musaIpcCloseMemHandle": _ipc_close,
    "musaHostRegister": _host_register,
    "musaHostUnregister": _host_unregister,
    "musaHostGetDevicePointer": _host_pointer,
    "musaStreamCreateWithFlags": _stream_create,
    "musaStreamIsCapturing": _is_capturing,
    "musaDeviceGetAttribute": _attribute,
    "musaRuntimeGetVersion": _version,
    "musaDriverGetVersion": _version,
}


def keeper_of(address: int) -> Any:
    """What keeps an address mapped, where it is shared memory."""
    for files in (_made, _opened):
        for start, file in files.items():
            if start <= address < start + file.nbytes:
                return file.mapping
    return None


def load(name: str) -> Library:
    """``musart`` or ``musa``; the CPU runs no kernels, so there are no modules in it.

    Raises:
        OSError: any other.
    """
    if name == "musart":
        return Library(
            {name: _coded(body) for name, body in _RUNTIME.items()}
            | {
                "musaGetLastError": _get_last_error,
                "musaGetErrorName": _runtime_text(0),
                "musaGetErrorString": _runtime_text(1),
            }
        )
    if name == "musa":
        return Library(
            {
                "muInit": lambda flags: 0,
                "muPointerGetAttribute": _coded(_pointer_attribute),
                "muGetErrorName": _driver_text(0),
                "muGetErrorString": _driver_text(1),
            }
        )
    raise OSError(f"lib{name}.so: the CPU simulator has no such library")
