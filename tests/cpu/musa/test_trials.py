"""What a device can do, as far as documents, the runtime and trials agree; unknown for the rest."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from halma.backends.musa import trials as module
from halma.backends.musa.graphs import MODES
from halma.backends.musa.tensors import tensor_at
from halma.backends.musa.trials import MusaTrials, choose_mode
from halma.backends.torch_device.family import MODULE_NAMES
from halma.hal.capabilities import UNKNOWN
from tests.cpu.musa.fakes import fake_torch_musa, use


def trials() -> Any:
    nothing: Any = None
    return MusaTrials(nothing, nothing, nothing)


def device(capability: tuple[int, int]) -> Any:
    return SimpleNamespace(capability=capability, index=0)


@pytest.mark.invariant("B8")
@pytest.mark.parametrize(
    ("capability", "told", "expected"),
    [
        ((2, 1), None, 128),
        ((2, 2), 128, 128),
        ((3, 1), 32, 32),
        ((3, 1), None, 32),
        ((2, 2), 32, UNKNOWN),  # compiled for 128, reported as 32: ggml-org/llama.cpp#12445
        ((3, 1), 128, UNKNOWN),
        ((4, 2), 32, UNKNOWN),  # an architecture that nothing is written about
    ],
)
def test_a_warp_is_as_wide_as_the_architecture_says_unless_the_runtime_disagrees(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], told: int | None, expected: Any
) -> None:
    use(monkeypatch)
    monkeypatch.setattr(module, "attribute", lambda name, index: told)
    made = trials()
    assert made.warp_width(device(capability)) == expected
    assert ("warp_width" in made.notes) is (expected is UNKNOWN)


@pytest.mark.invariant("B8", control=True)
def test_where_another_compiler_stands_in_the_runtime_alone_says_it(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, dialect="another")
    monkeypatch.setattr(module, "attribute", lambda name, index: 32)
    assert trials().warp_width(device((9, 0))) == 32


@pytest.mark.parametrize(
    ("capability", "works", "expected"), [((2, 2), True, False), ((3, 1), True, True), ((3, 1), False, False)]
)
def test_fp8_is_there_from_mp_31_on_and_its_bits_are_looked_at(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], works: bool, expected: bool
) -> None:
    use(monkeypatch)
    monkeypatch.setattr(MusaTrials, "fp8_e4m3fn", lambda self: works)
    assert trials().fp8(device(capability)) is expected


def raising() -> Any:
    raise RuntimeError("operation not permitted when stream is capturing")


@pytest.mark.parametrize(
    ("captures", "allocates", "mode", "answer"),
    [
        (MODES, MODES, MODES[0], True),
        (
            MODES,
            ("relaxed",),
            "relaxed",
            True,
        ),  # the exchange of modes is a stub: only the lax mode lets malloc through
        (("global",), ("global",), "global", True),
        (("global", "relaxed"), (), "global", True),
        ((), (), MODES[0], UNKNOWN),
    ],
)
def test_the_mode_is_the_first_in_which_a_capture_works_and_allocates(
    monkeypatch: pytest.MonkeyPatch, captures: tuple[str, ...], allocates: tuple[str, ...], mode: str, answer: Any
) -> None:
    recipe: Any = SimpleNamespace(mode="")

    def where(modes: tuple[str, ...]) -> Callable[[Any], Any]:
        return lambda self: True if recipe.mode in modes else raising()

    monkeypatch.setattr(MusaTrials, "graph_capture", where(captures))
    monkeypatch.setattr(MusaTrials, "allocating_capture", where(allocates))
    made = trials()
    assert choose_mode(made, recipe) == answer and recipe.mode == mode
    assert ("allocation in a capture" in made.notes) is bool(captures and not allocates)


def test_a_device_that_captures_wrongly_does_not_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MusaTrials, "graph_capture", lambda self: False)
    assert choose_mode(trials(), SimpleNamespace(mode="")) is False  # pyright: ignore[reportArgumentType]


def test_memory_of_the_runtime_becomes_a_tensor_that_keeps_its_owner(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the host's memory: the same call of torch, and a stand-in for torch_musa's."""
    musa = fake_torch_musa()

    def construct(geometry: dict[str, Any], storage: Any) -> torch.Tensor:
        made = torch.empty(0, dtype=geometry["dtype"])
        return made.set_(storage, geometry["storage_offset"], geometry["size"], geometry["stride"])

    musa._MUSAC._construct_MUSA_Tensor_From_Storage_And_Metadata = construct
    use(monkeypatch, module=musa)
    owner = torch.arange(64, dtype=torch.uint8)
    found = tensor_at(owner.data_ptr() + 8, 16, torch.device("cpu"), owner)
    references = torch.arange(64, dtype=torch.uint8)  # would take the owner's memory, were it free
    view = found.view(torch.int32)
    del found, owner
    assert view.view(torch.uint8).tolist() == list(range(8, 24)) and references.numel() == 64
    assert view.untyped_storage().halma_owner is not None


SHARED = Path(__file__).parents[3] / "backends" / "torch_device"


@pytest.mark.torchfree
def test_what_the_shared_code_takes_of_a_familys_module_is_declared() -> None:
    """So that the declared names can be compared with what another torch offers."""
    used: set[str] = set()
    for path in SHARED.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and re.fullmatch(r"(.*\.)?module", ast.unparse(node.value)):
                used.add(node.attr)
    assert used - {"__name__", "SimtChannel", "SimtRings"} == set(MODULE_NAMES)
