"""The memory that a launch's parameters are read from."""

from __future__ import annotations

import ctypes
import threading
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from halma.backends.torch_device.launching import MOST_PARAMETERS, Parameters
from halma.hal.errors import KernelError

ONE = st.one_of(
    st.integers(0, 2**64 - 1),
    st.integers(-(2**63), -1),
    st.integers(-(2**31), 2**31 - 1).map(ctypes.c_int),
    st.floats(width=32, allow_nan=False).map(np.float32),
    st.floats(allow_nan=False).map(ctypes.c_double),
    st.integers(0, 255).map(np.uint8),
)


def read(address: int, args: list[Any]) -> list[bytes]:
    """As a driver reads: through each parameter's address, so many bytes as it has."""
    places = (ctypes.c_void_p * max(len(args), 1)).from_address(address)
    return [ctypes.string_at(places[index] or 0, size(arg)) for index, arg in enumerate(args)]


def size(arg: Any) -> int:
    return 8 if isinstance(arg, int) else arg.nbytes if isinstance(arg, np.generic) else ctypes.sizeof(arg)


def raw(arg: Any) -> bytes:
    if isinstance(arg, int):
        return (arg % 2**64).to_bytes(8, "little")
    return arg.tobytes() if isinstance(arg, np.generic) else bytes(arg)


@given(st.lists(st.lists(ONE, max_size=MOST_PARAMETERS), min_size=1, max_size=3))
def test_every_argument_is_read_back_in_its_own_size(launches: list[list[Any]]) -> None:
    parameters = Parameters()
    for args in launches:
        assert read(parameters.packed(args), args) == [raw(arg) for arg in args]


def test_threads_do_not_share_a_launchs_memory() -> None:
    parameters, found = Parameters(), dict[str, int]()
    own = parameters.packed([1, 2])
    thread = threading.Thread(target=lambda: found.update(other=parameters.packed([3, 4])))
    thread.start()
    thread.join()
    assert found["other"] != own and read(own, [1, 2]) == [raw(1), raw(2)]


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ([0] * (MOST_PARAMETERS + 1), "65 arguments of a kernel"),
        ([1.5], "float: 1.5"),
        ([1, None], "NoneType"),
        ([1, np.longdouble(1)], "at most 8 bytes"),
    ],
)
def test_what_is_no_argument_is_refused(args: list[Any], says: str) -> None:
    with pytest.raises(KernelError, match=says):
        Parameters().packed(args)
