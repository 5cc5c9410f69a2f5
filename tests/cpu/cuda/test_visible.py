"""CUDA_VISIBLE_DEVICES, as the driver reads it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halma.backends.torch_device.visible import visible_devices

UUIDS = [f"GPU-{index:08x}-1111-2222-3333-44445555666{index}" for index in range(4)]

pytestmark = pytest.mark.torchfree


@pytest.mark.invariant("B1")
@pytest.mark.parametrize(
    ("value", "expected", "why"),
    [
        ("", (), "empty"),
        ("  ", (), "empty"),
        ("-1", (), "ends at '-1'"),
        ("0,-1,1", (0,), "ends at '-1'"),
        ("2,0", (2, 0), "CUDA_VISIBLE_DEVICES=2,0"),
        ("1,9,0", (1,), "ends at '9'"),
        ("1,1", (), "names device 1 twice"),
        ("none", (), "ends at 'none'"),
        ("0gpu,1x", (0, 1), "0gpu"),
        (UUIDS[2], (2,), "GPU-"),
        ("GPU-00000001", (1,), "GPU-"),
        ("gpu-00000003,0", (3, 0), "gpu-"),
        ("GPU-0000000", (), "names no device here"),
        ("MIG-00000001", (), "names no device here"),
        (" 1 , 0 ", (1, 0), "1 , 0"),
    ],
)
def test_what_the_variable_leaves(value: str, expected: tuple[int, ...], why: str) -> None:
    found = visible_devices("CUDA_VISIBLE_DEVICES", value, UUIDS)
    assert found.positions == expected and why in found.why


@pytest.mark.invariant("B1", control=True)
@pytest.mark.parametrize("value", [None, "0,1,2,3"])
def test_without_the_variable_or_with_all_of_them_nothing_is_hidden(value: str | None) -> None:
    found = visible_devices("CUDA_VISIBLE_DEVICES", value, UUIDS)
    assert found.positions == (0, 1, 2, 3) and found.why == ""


ENTRIES = st.one_of(
    st.integers(-3, 6).map(str),
    st.sampled_from([*UUIDS, "GPU-00000002", "GPU-", "MIG-x", "", " ", "x", "+1", "1 ", "0x1"]),
)


@pytest.mark.invariant("B1")
@given(entries=st.lists(ENTRIES, max_size=6), count=st.integers(0, 4))
def test_any_list_is_read_from_the_left_up_to_the_first_entry_that_names_nothing(
    entries: list[str], count: int
) -> None:
    uuids = UUIDS[:count]
    found = visible_devices("X", ",".join(entries), uuids).positions
    assert len(set(found)) == len(found) and all(0 <= position < count for position in found)
    for keep in range(len(entries) + 1):  # a prefix of the list sees a prefix of the devices, unless one is twice
        part = visible_devices("X", ",".join(entries[:keep]), uuids).positions
        assert found == () or part == found[: len(part)]
    if found:
        single = [visible_devices("X", entry, uuids).positions for entry in entries[: len(found)]]
        assert [position for one in single for position in one] == list(found)
