"""The recorded table itself: that it says what is known of torch_musa 2.7.1, and that it is made from a checkout."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from types import ModuleType

import pytest

from ci import musa_contract
from ci.musa_contract import Checkout, record
from ci.musa_sources import bound_names, environment_names, throwing_stubs
from ci.musa_table import FILE, Absent, Instance, Ref, contract, mismatches, stand_in_differences
from halma.backends.musa.contract import CONTRACT, version_warning

pytestmark = [pytest.mark.torchfree, pytest.mark.evidence("contract")]


def test_the_table_says_where_it_is_from() -> None:
    table = json.loads(FILE.read_text(encoding="utf-8"))
    assert table["contract"] == CONTRACT == contract().version
    assert table["source"] == {
        "repository": "https://github.com/MooreThreads/torch_musa",
        "tag": "v2.7.1",
        "commit": "0bc05bff11712400fd53aa7dd8e68950a4c46647",
        "licence": "BSD-3-Clause",
    }
    assert {one["rest"] for one in table["other_versions"].values()} == {"unknown"}


@pytest.mark.parametrize(
    ("name", "signature"),
    [
        ("current_stream", "(device=None)"),
        ("get_device_properties", "(device)"),
        ("can_device_access_peer", "(device, peer_device)"),
        ("make_graphed_callables", "(callables, sample_args, num_warmup_iters=3, allow_unused_input=False)"),
        ("use_mem_pool", "(pool, device=None)"),
    ],
)
def test_signatures_are_those_of_the_sources(name: str, signature: str) -> None:
    thing = contract().attribute(Ref("torch_musa"), name)
    assert thing is not None
    assert contract().entries[thing.path]["signature"] == signature


def test_what_makes_musa_differ_from_cuda_is_in_the_table() -> None:
    table = contract()
    properties = table.members("torch_musa._MUSAC._MusaDeviceProperties")
    assert set(properties) - {"__repr__"} == {
        "name", "major", "minor", "is_multi_gpu_board", "is_integrated", "multi_processor_count", "total_memory",
    }  # fmt: skip
    graph = table.members("torch_musa.musa_graph.graphs.graph")
    assert graph["__init__"] == "(musa_graph, pool=None, stream=None, capture_error_mode='global')"
    assert {"reinstantiate_graph", "get_latest_instance"} <= set(
        table.members("torch_musa.musa_graph.graphs.MUSAGraph")
    )
    assert set(table.members("torch_musa._MUSAC._musart")) == {
        "musaGetErrorString", "musaHostRegister", "musaHostUnregister", "musaStreamCreate", "musaStreamDestroy",
        "musaMemGetInfo",
    }  # fmt: skip
    assert table.members("torch_musa.core.stream.Stream")["musa_stream"] == "property"
    assert table.stubs["musaThreadExchangeStreamCaptureMode"]["when"] == "always"
    assert table.stubs["musaGraphDebugDotPrint"]["when"] == "toolkit older than 4.2"
    assert table.throws("torch_musa.musa_graph.graphs.MUSAGraph.debug_dump") is not None
    assert table.throws("torch_musa.musa_graph.graphs.MUSAGraph.replay") is None
    assert {"MUSA_VISIBLE_DEVICES", "PYTORCH_MUSA_ALLOC_CONF", "TORCH_MUSA_ARCH_LIST"} <= table.environment
    with pytest.raises(Absent):
        table.attribute(Instance("torch_musa._MUSAC._MusaDeviceProperties"), "warp_size")


@pytest.mark.parametrize(
    ("signature", "positional", "keywords", "problem"),
    [
        ("(a, b=1)", 1, [], None),
        ("(a, b=1)", 0, ["a", "b"], None),
        ("(a, b=1)", 3, [], "takes 2 positional arguments, gets 3"),
        ("(a, b=1)", 0, [], "needs a: (a, b=1)"),
        ("(a, b=1)", 1, ["c"], "has no parameter c: (a, b=1)"),
        ("(a, b=1)", 1, ["a"], "gets a twice"),
        ("(a0, /)", 0, ["a0"], "has no parameter a0: (a0, /)"),
        ("(*unknown)", 9, [], None),
        ("(a=None, **kwargs)", 0, ["other"], None),
        ("(a, *, c)", 1, [], "needs c: (a, *, c)"),
    ],
)
def test_calls_are_held_to_signatures(
    signature: str, positional: int, keywords: list[str], problem: str | None
) -> None:
    found = mismatches(signature, positional, keywords)
    assert (problem in found) if problem else found == []


BINDINGS = """
// m.def("commented", &gone);
static PyMethodDef ToyMethods[] = {
    {"_toy_now", toy_now, METH_NOARGS, nullptr},
    {"_toy_one",
     toy_one, METH_O, nullptr},
    {nullptr}};
static struct PyGetSetDef ToyStream_properties[] = {
    {"toy_stream", (getter)get, nullptr, nullptr, nullptr}, {nullptr}};
void init(PyObject* module) {
  PyModule_AddObject(module, "_ToyStreamBase", (PyObject*)&ToyStreamType);
  py::class_<Toy, std::shared_ptr<Toy>>(m, "_Toy")
      .def(py::init<int, bool>())
      .def_readonly("size", &Toy::size)
      .def("grow", [](Toy& self, std::pair<int, int> by) { return self; })
      .def("named", &Toy::named, py::arg("first"), py::arg("second") = 3);
  m.def("_toy_free", [](Index device, Id<int> pool) { release(device, pool); });
}
"""


def test_bindings_are_read_from_cpp() -> None:
    assert {(one.owner, one.name): one.signature for one in bound_names(BINDINGS)} == {
        ("", "_toy_now"): "()",
        ("", "_toy_one"): "(argument, /)",
        ("_ToyStreamBase", "toy_stream"): "property",
        ("", "_Toy"): "property",
        ("_Toy", "__init__"): "(a0, a1, /)",
        ("_Toy", "size"): "property",
        ("_Toy", "grow"): "(a0, /)",
        ("_Toy", "named"): "(first, second=...)",
        ("", "_toy_free"): "(a0, a1, /)",
    }


def test_stubs_and_variables_are_read_from_cpp() -> None:
    text = """
        __host__ musaError_t musaNever(int a) { C10_THROW_ERROR(NotImplementedError, "no"); }
        #if defined(REAL_MUSA_VERSION) && (REAL_MUSA_VERSION < 4030)
        __host__ musaError_t musaLater(int a) { C10_THROW_ERROR(NotImplementedError, "no"); }
        #endif
        const char* env = getenv("TORCH_MUSA_TOY");
    """
    assert throwing_stubs(text) == {"musaNever": "always", "musaLater": "toolkit older than 4.3"}
    assert environment_names(text) == {"TORCH_MUSA_TOY"}


@pytest.fixture
def toy(tmp_path: Path) -> Path:
    """A checkout with the layout of torch_musa and one name of each kind."""
    files = {
        "torch_musa/__init__.py": (
            "import torch_musa._MUSAC\nfrom .core.device import Device as device, count\nfrom .core.stream import *\n"
        ),
        "torch_musa/core/__init__.py": "",
        "torch_musa/core/device.py": (
            "import torch_musa\nraw = torch_musa._MUSAC._toy_one\n"
            "class Device:\n    def __init__(self, index: int): ...\n"
            "def count(all: bool = False) -> int: ...\n"
        ),
        "torch_musa/core/stream.py": (
            "__all__ = ['Stream', 'current']\nclass Stream(torch_musa._MUSAC._ToyStreamBase):\n"
            "    def wait(self, event=None): ...\ndef current(device=None) -> Stream: ...\ndef _hidden(): ...\n"
        ),
        "torch_musa/csrc/core/Module.cpp": BINDINGS,
    }
    for module in musa_contract.MODULES:
        files.setdefault(module.replace(".", "/") + ".py", "")
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    git = ["git", "-C", str(tmp_path), "-c", "user.name=t", "-c", "user.email=t@t"]
    for command in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "toy"], ["tag", "v9.9"]):
        subprocess.run([*git, *command], check=True)
    return tmp_path


def test_a_checkout_is_recorded(toy: Path) -> None:
    table = record(Checkout(toy, "v9.9"), "9.9")
    names = table["modules"]["torch_musa"]
    assert names["device"] == "torch_musa.core.device.Device" and names["Stream"] == "torch_musa.core.stream.Stream"
    assert "_hidden" not in names and "_hidden" in table["modules"]["torch_musa.core.stream"]
    assert table["modules"]["torch_musa.core.device"]["raw"] == "torch_musa._MUSAC._toy_one"
    assert table["entries"]["torch_musa.core.device.count"]["signature"] == "(all=False)"
    assert table["entries"]["torch_musa.core.stream.current"]["returns"] == "torch_musa.core.stream.Stream"
    assert table["entries"]["torch_musa.core.device.Device"]["members"] == {"__init__": "(index)"}
    assert table["entries"]["torch_musa._MUSAC._toy_free"]["signature"] == "(a0, a1, /)"


def test_the_command_writes_and_compares(toy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    user = tmp_path / "user"
    user.mkdir()
    (user / "a.py").write_text("import torch\ntorch.musa.count()\ntorch.musa.own = 1\nx = torch.musa.own\n")
    file = tmp_path / "table.json"
    common = ["--checkout", str(toy), "--revision", "v9.9"]
    assert musa_contract.main([*common, "--user", "9.10", "a package", str(user), "--output", str(file)]) == 0
    table = json.loads(file.read_text())
    assert table["other_versions"] == {"9.10": {"source": "a package", "used": {"count": "a.py"}, "rest": "unknown"}}
    assert musa_contract.main([*common, "--check", str(file)]) == 0
    table["modules"]["torch_musa"]["more"] = "torch_musa.more"
    file.write_text(json.dumps(table))
    assert musa_contract.main([*common, "--check", str(file)]) == 1
    assert "differs in: modules" in capsys.readouterr().out


def test_a_stand_in_is_held_to_the_contract() -> None:
    stand_in = ModuleType("torch_musa")

    class Event:
        def __new__(cls, enable_timing=False, blocking=False, interprocess=False):
            return super().__new__(cls)

        def record(self, stream=None): ...

    def current_stream(device=None): ...

    stand_in.Event, stand_in.current_stream = Event, current_stream  # pyright: ignore[reportAttributeAccessIssue]
    assert stand_in_differences(stand_in) == []
    Event.record = lambda self, stream, more=1: None  # type: ignore[method-assign]
    Event.instantiate = lambda self: None  # type: ignore[attr-defined]
    stand_in.nvtx = lambda: None  # pyright: ignore[reportAttributeAccessIssue]
    assert stand_in_differences(stand_in) == [
        "torch_musa.core.stream.Event.record(stream, more=1) stands in for (stream=None)",
        "torch_musa.core.stream.Event has no instantiate",
        "torch_musa has no nvtx",
    ]


def test_another_version_is_warned_of() -> None:
    assert version_warning("2.7.1") is None and version_warning("2.7.1+musa4.3") is None
    assert "2.11.0.post2 is installed" in (version_warning("2.11.0.post2") or "")
    assert "contract 2.7.1" in (version_warning("2.11.0.post2") or "") and "contract 2.7.1" in (
        version_warning(None) or ""
    )
