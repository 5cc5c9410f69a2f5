"""Looking for Moore Threads GPUs: every reason why not; no torch, no driver, nothing raised."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import EntryPoint
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from halma.backends.musa import probing, simulator
from halma.backends.musa.probing import CONTRACT, Machine, ask_child, ask_mtml, installed, verdict
from halma.backends.musa.seam import LIBRARIES
from halma.backends.torch_device.machine import Gpu, NoDriver
from halma.hal.backend import Probe
from halma.hal.plugins import BACKENDS
from halma.hal.registry import Registry, SelectionError

pytestmark = pytest.mark.torchfree

GPU = Gpu("MTT S5000", "GPU-aa", 80 << 30)
TWO = Machine((GPU, Gpu("MTT S4000", "GPU-bb", 48 << 30)), "3.3.5", "MTML")


class MTMLError(Exception):
    """As pymtml has it."""


def mtml(**replaced: Any) -> Any:
    """A stand-in for the module pymtml with two devices; ``replaced`` functions take the place of its own."""
    calls: list[str] = []
    module = SimpleNamespace(
        calls=calls,
        MTMLError=MTMLError,
        mtmlLibraryInit=lambda: calls.append("init"),
        mtmlLibraryShutDown=lambda: calls.append("shutdown"),
        mtmlLibraryCountDevice=lambda: 2,
        mtmlLibraryInitSystem=lambda: "system",
        mtmlSystemGetDriverVersion=lambda system: b"3.3.5",
        mtmlLibraryInitDeviceByIndex=lambda index: index,
        mtmlDeviceGetName=lambda device: ["MTT S5000", b"MTT S4000"][device],
        mtmlDeviceGetUUID=lambda device: ["GPU-aa", "GPU-bb"][device],
        mtmlDeviceInitMemory=lambda device: device,
        mtmlMemoryGetTotal=lambda memory: [80 << 30, 48 << 30][memory],
    )
    for name, function in replaced.items():
        setattr(module, name, function)
    return module


def raising(error: Exception) -> Callable[..., Any]:
    def function(*_: Any) -> Any:
        raise error

    return function


@pytest.mark.invariant("B1", control=True)
def test_the_management_library_tells_the_devices_and_is_left_running() -> None:
    module = mtml()
    assert ask_mtml(module) == TWO and module.calls == ["init"]


@pytest.mark.invariant("B1")
@pytest.mark.parametrize(
    ("replaced", "says"),
    [
        ({"mtmlLibraryInit": raising(OSError("Failed to load MTML library\nmore"))}, "MTML says 'Failed to load MTML"),
        ({"mtmlLibraryInit": raising(MTMLError("Driver Not Loaded"))}, "no Moore Threads driver: MTML says"),
        ({"mtmlLibraryCountDevice": raising(MTMLError("Unknown Error"))}, "MTML fails with 'Unknown Error'"),
    ],
)
def test_without_a_driver_it_says_why(replaced: dict[str, Any], says: str) -> None:
    with pytest.raises(NoDriver, match=says):
        ask_mtml(mtml(**replaced))


@pytest.mark.invariant("B1")
@pytest.mark.parametrize("there", [True, False])
def test_it_is_asked_where_it_can_be_imported_and_a_child_where_not(
    monkeypatch: pytest.MonkeyPatch, there: bool
) -> None:
    monkeypatch.setitem(sys.modules, "pymtml", mtml() if there else None)  # None: importing it fails
    monkeypatch.setattr(probing, "ask_child", lambda: "the child")
    assert probing.look() == (TWO if there else "the child")


def test_the_childs_answer_is_taken_and_it_sees_all_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MUSA_VISIBLE_DEVICES", "")
    source = (
        "import json, os; assert 'MUSA_VISIBLE_DEVICES' not in os.environ; "
        "print(json.dumps({'gpus': [['MTT S5000', 'GPU-aa', 85899345920]]}))"
    )
    assert ask_child(source, driver_files=(__file__,)) == Machine((GPU,), "unknown", "a child process")
    assert ask_child(f"raise SystemExit({probing.NO_DEVICE!r})", driver_files=(__file__,)).gpus == ()
    with pytest.raises(NoDriver, match="no usable Moore Threads driver: .* ended with: OSError"):
        ask_child("raise OSError('libmusa.so: cannot open')", driver_files=(__file__,))


class Loaded(Exception):
    """The child came past the search for the library; the text is the name it found."""


@pytest.mark.parametrize(
    "there",
    [
        pytest.param(("libmusa.so",), id="plain", marks=pytest.mark.invariant("B1", control=True)),
        pytest.param(("libmusa.so.1",), id="versioned", marks=pytest.mark.invariant("B1")),
        pytest.param((), id="none", marks=pytest.mark.invariant("B1")),
    ],
)
def test_the_child_looks_for_the_driver_under_the_names_that_the_backend_does(
    monkeypatch: pytest.MonkeyPatch, there: tuple[str, ...]
) -> None:
    def load(file: str) -> Any:
        if file not in there:
            raise OSError(f"{file}: no such file")
        raise Loaded(file)

    monkeypatch.setattr(ctypes, "CDLL", load)
    with pytest.raises((Loaded, OSError)) as found:
        exec(probing.CHILD, {})
    assert str(found.value) == (there[0] if there else "; ".join(f"{file}: no such file" for file in LIBRARIES["musa"]))
    assert isinstance(found.value, Loaded) is bool(there)


# -- the software ------------------------------------------------------------------------------------------


@pytest.mark.invariant("B1")
@pytest.mark.parametrize(
    ("torch", "musa", "says"),
    [
        (None, None, "torch is not installed"),
        ("2.7.1", None, "torch_musa is not installed"),
        ("2.5.0", "2.5.0", "torch_musa 2.5.0 is too old: 2.7"),
        ("2.2.0", "2.1.1", "too old"),
        ("2.13.0+cpu", "2.7.1", "torch_musa 2.7.1 was built for torch 2.7.1, not 2.13.0"),
        ("2.7.1", "2.11.0.post2", "was built for torch 2.11.0, not 2.7.1"),
        ("2.7.1", "nonsense", "torch_musa nonsense is too old"),
    ],
)
def test_software_that_does_not_fit_is_said(torch: str | None, musa: str | None, says: str) -> None:
    problem, _ = installed({"torch": torch, "torch_musa": musa}.get)
    assert problem is not None and says in problem


@pytest.mark.invariant("B1", control=True)
@pytest.mark.parametrize(
    ("torch", "musa", "warns"),
    [("2.7.1", "2.7.1", False), ("2.7.1+musa", "2.7.1.post1", False), ("2.11.0", "2.11.0.post2", True)],
)
def test_software_that_fits_is_taken_and_another_version_than_the_contracts_is_warned_of(
    torch: str, musa: str, warns: bool
) -> None:
    problem, detail = installed({"torch": torch, "torch_musa": musa}.get)
    assert problem is None and detail["contract"].startswith(CONTRACT)
    assert ("is installed, the backend is written against" in detail["contract"]) is warns
    assert detail["torch_musa"] == musa


def test_beside_torchada_it_is_refused_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchada", ModuleType("torchada"))
    problem, _ = installed({"torch": "2.7.1", "torch_musa": "2.7.1"}.get)
    assert problem is not None and "torchada was imported" in problem


@pytest.mark.parametrize("mode", ["cpu", "cuda"])
def test_beside_torchada_its_stand_ins_are_refused_too(monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    monkeypatch.setitem(sys.modules, "torchada", ModuleType("torchada"))
    there = simulator.probe(mode)
    assert not there.ok and "torchada was imported" in there.reason


# -- the verdict -------------------------------------------------------------------------------------------


@pytest.mark.invariant("B1")
@pytest.mark.parametrize(
    ("machine", "environment", "says"),
    [
        (Machine((), "3.3.5", "MTML"), {}, "finds no device"),
        (TWO, {"MUSA_VISIBLE_DEVICES": ""}, "MUSA_VISIBLE_DEVICES is empty, which hides every device; the machine"),
        (TWO, {"MUSA_VISIBLE_DEVICES": "7"}, "ends at '7', which names no device here"),
    ],
)
def test_what_makes_it_unusable_is_said(machine: Machine, environment: dict[str, str], says: str) -> None:
    found = verdict(machine, environment, {}, "/mcc")
    assert not found.ok and says in found.reason and found.detail["driver"] == "3.3.5"


@pytest.mark.invariant("B1", control=True)
@pytest.mark.parametrize(
    ("environment", "mcc", "reason"),
    [
        ({}, "/mcc", "2 devices: MTT S5000"),
        ({"MUSA_VISIBLE_DEVICES": "1"}, "/mcc", "1 device: MTT S4000 (MUSA_VISIBLE_DEVICES=1; the machine has 2)"),
        ({}, None, "2 devices: MTT S5000; mcc not found"),
    ],
)
def test_a_usable_machine_shows_its_devices(environment: dict[str, str], mcc: str | None, reason: str) -> None:
    found = verdict(TWO, environment, {}, mcc)
    assert found.ok and found.reason == reason and ("kernels" in found.detail) is (mcc is None)


@pytest.mark.parametrize(
    ("environment", "ignored"),
    [
        ({"CUDA_VISIBLE_DEVICES": "1"}, True),
        ({"CUDA_VISIBLE_DEVICES": "1", "MUSA_VISIBLE_DEVICES": "0"}, False),  # a mixed machine: each has its own
        ({}, False),
    ],
)
def test_a_variable_of_another_vendor_hides_nothing_and_is_pointed_at(
    environment: dict[str, str], ignored: bool
) -> None:
    found = verdict(TWO, environment, {}, "/mcc")
    assert found.ok and ("CUDA_VISIBLE_DEVICES=1" in found.detail.get("ignored", "")) is ignored


@pytest.mark.invariant("B1")
@pytest.mark.parametrize("trouble", [NoDriver("no driver"), OSError("odd"), None])
def test_the_probe_never_raises(monkeypatch: pytest.MonkeyPatch, trouble: Exception | None) -> None:
    def look() -> Machine:
        if trouble is not None:
            raise trouble
        return TWO

    monkeypatch.setattr(probing, "installed", lambda version_of: (None, {"contract": CONTRACT}))
    monkeypatch.setattr(probing, "look", look)
    found = probing.probe({"MUSA_VISIBLE_DEVICES": "1", "PATH": ""})
    assert found.ok is (trouble is None) and (trouble is None or str(trouble) in found.reason)


@pytest.mark.invariant("B10")
@pytest.mark.parametrize("simulated", [False, True])
def test_on_a_machine_of_both_vendors_auto_takes_neither_and_a_stand_in_is_no_choice(
    monkeypatch: pytest.MonkeyPatch, simulated: bool
) -> None:
    for name in ("HALMA_BACKEND", "HALMA_MUSA_SIM"):
        monkeypatch.delenv(name, raising=False)
    if simulated:
        monkeypatch.setenv("HALMA_MUSA_SIM", "cpu")
    monkeypatch.setattr("halma.backends.cuda.probing.probe", lambda: Probe(True, "1 device: NVIDIA H200"))
    monkeypatch.setattr("halma.backends.musa.probing.probe", lambda: Probe(True, "1 device: MTT S5000"))
    monkeypatch.setattr("halma.backends.musa.simulator.probe", lambda mode: Probe(True, f"simulated: {mode}"))
    plugins = {"cuda": "halma.backends.cuda", "musa": "halma.backends.musa"}
    registry = Registry(EntryPoint(name, value, BACKENDS) for name, value in plugins.items())
    if simulated:
        assert registry.choose()[0].name == "cuda"
        return
    with pytest.raises(SelectionError) as caught:
        registry.choose()
    assert sorted(one.name for one in caught.value.statuses if one.usable) == ["cuda", "musa"]
    assert registry.choose("musa")[0].reason == "1 device: MTT S5000"


CHILD = """
import sys
from halma.backends.musa import probe
found = probe()
print(found.ok, [name for name in ("torch", "numpy", "torch_musa", "pymtml") if name in sys.modules], found.reason)
"""


@pytest.mark.invariant("B1")
def test_probing_in_a_fresh_process_imports_nothing_heavy() -> None:
    run = subprocess.run([sys.executable, "-c", CHILD], capture_output=True, text=True, timeout=60, check=True)
    ok, heavy, reason = run.stdout.split(maxsplit=2)
    assert ok in ("True", "False") and heavy == "[]" and len(reason) > 10, run.stdout


@pytest.mark.invariant("B10")
@pytest.mark.parametrize(("value", "simulated"), [(None, False), ("cpu", True), ("gpu", True)])
def test_over_a_stand_in_it_says_simulated_and_a_mode_that_is_none_is_a_reason(
    monkeypatch: pytest.MonkeyPatch, value: str | None, simulated: bool
) -> None:
    from halma.backends import musa

    monkeypatch.delenv("HALMA_MUSA_SIM", raising=False)
    if value is not None:
        monkeypatch.setenv("HALMA_MUSA_SIM", value)
    specs: list[Any] = []
    musa.halma_register_backends(specs.append)
    assert [(spec.simulated, spec.evidence) for spec in specs] == [(simulated, "simulated" if simulated else "musa")]
    if value == "gpu":
        assert not musa.probe().ok and "HALMA_MUSA_SIM cannot be 'gpu'" in musa.probe().reason
