"""The CPU simulator's device: what runs there gives the CPU's answers, and what a device refuses is refused."""

from __future__ import annotations

from typing import Any

import pytest

from tests.simulated.children import findings, run


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    return findings("tests.simulated.device_program")


def test_tensors_say_where_they_are(found: dict[str, Any]) -> None:
    assert found["device"] == "musa:0"
    assert found["plain"], "a subclass would behave in ways of its own"
    assert found["address"], "views must share a storage with an address"


def test_answers_are_the_cpus(found: dict[str, Any]) -> None:
    assert found["same"] == [True] * 8
    assert found["grown"] == [[3, 4], 12.0]
    assert found["item"] == 66.0


def test_what_a_device_refuses_is_refused(found: dict[str, Any]) -> None:
    refused = found["refused"]
    assert "same device" in refused["host operand"]
    assert "same device" in refused["host destination"]
    assert "numpy" in refused["numpy"]
    assert refused["cuda literal"]
    assert refused["cuda event"]
    assert found["number on the host"] == "", "a number of no dimension may come from the host"
    assert found["pinned"] == [True, True, False]


def test_events_of_another_kind_are_caught(found: dict[str, Any]) -> None:
    events = found["events"]
    assert events["own"] == ""
    for name in ("foreign wait", "foreign record", "foreign stream"):
        assert events[name].startswith("TypeError"), name
    assert found["stream"] == [True, True, True]


def test_names_are_those_of_the_pinned_version(found: dict[str, Any]) -> None:
    assert found["fields"] == sorted(
        ["name", "major", "minor", "is_multi_gpu_board", "is_integrated", "multi_processor_count", "total_memory"]
    )
    assert found["no argument"].startswith("TypeError")
    assert "cuda_graph" in found["graph keyword"]
    assert not [name for name in found["musart"] if "Ipc" in name or "Malloc" in name]
    assert found["missing"] == []
    assert found["is torch.musa"]


def test_the_libraries_answer_with_codes(found: dict[str, Any]) -> None:
    assert found["malloc"] == 0
    assert found["filled"] == "07070707"
    assert found["interior handle"] != 0
    assert found["free"] == [0, 1]
    assert found["too much"] == 2
    assert found["last error"] == [2, 0]
    assert not found["kernels"]


def test_a_process_has_one_device_of_its_own() -> None:
    taken = run(
        "-c",
        "import torch; torch.utils.rename_privateuse1_backend('other')\n"
        "from halma.backends.musa.seam import toolchain\n"
        "try: toolchain()\n"
        "except Exception as error: print(type(error).__name__, error.what, *error.found)",
    )
    assert "BackendError" in taken.stdout
    assert "'other'" in taken.stdout
