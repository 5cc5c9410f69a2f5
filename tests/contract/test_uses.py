"""Every use of torch_musa in the MUSA backend against the recorded contract of torch_musa 2.7.1, by syntax tree.

Shows that names, keywords and numbers of arguments are those of that release. Shows nothing of what they do.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from ci.musa_table import contract
from ci.musa_uses import FOLDERS, ROOT, SEEN_ELSEWHERE, check, check_folders, main

pytestmark = [pytest.mark.torchfree, pytest.mark.evidence("contract")]


def found(source: str) -> list[str]:
    return [one.what for one in check(source)]


def test_the_backend_uses_nothing_that_torch_musa_2_7_1_lacks() -> None:
    findings, files = check_folders()
    assert [str(one) for one in findings] == []
    assert files >= sum(len(list((ROOT / folder).glob("*.py"))) for folder in FOLDERS) > 0


WRONG = {
    # a name that does not exist
    "import torch_musa\ntorch_musa.get_stream_from_external(1)": "torch_musa has no get_stream_from_external",
    "import torch\ntorch.musa.list_gpu_processes()": "torch_musa has no list_gpu_processes",
    "from torch_musa import CUDAGraph": "torch_musa has no CUDAGraph",
    "import torch_musa\nf = torch_musa._MUSAC._musa_endAllocateToPool": (
        "torch_musa._MUSAC has no _musa_endAllocateToPool"
    ),
    "import importlib\nm = importlib.import_module('torch_musa')\nm.nvtx": "torch_musa has no nvtx",
    "import sys\nsys.modules['torch_musa'].cudart()": "torch_musa has no cudart",
    "import torch_musa as mu\ngetattr(mu, 'utilization')": "torch_musa has no utilization",
    "def f(family):\n    return family.module.caching_allocator_alloc(1)": "torch_musa has no caching_allocator_alloc",
    # a member that does not exist
    "import torch_musa\np = torch_musa.get_device_properties(0)\np.uuid": "_MusaDeviceProperties has no uuid",
    "import torch_musa\ndef f(s: torch_musa.Stream):\n    return s.handle": "Stream has no handle",
    "import torch\nclass A:\n    graph: torch.musa.MUSAGraph\n    def f(self):\n        self.graph.instantiate()": (
        "MUSAGraph has no instantiate"
    ),
    # a keyword that does not exist
    "import torch_musa\nwith torch_musa.graph(cuda_graph=torch_musa.MUSAGraph()): pass": "has no parameter cuda_graph",
    "import torch_musa\ntorch_musa.MUSAGraph(keep_graph=True)": "has no parameter keep_graph",
    "import torch_musa\ntorch_musa.make_graphed_callables(f, (), pool=p)": "has no parameter pool",
    "import torch_musa\ntorch_musa._MUSAC._musa_releasePool(device=0, mempool_id=p)": "has no parameter device",
    "import torch_musa\ntorch_musa.Event(external=True)": "has no parameter external",
    # too many and too few arguments
    "import torch_musa\ntorch_musa.synchronize(0, True)": "takes 1 positional arguments, gets 2",
    "import torch_musa\ntorch_musa._MUSAC._musa_setDevice(0, 1)": "takes 1 positional arguments, gets 2",
    "import torch_musa\ntorch_musa.Event(True, False, False, True)": "takes 3 positional arguments, gets 4",
    "import torch_musa\ntorch_musa.get_device_properties()": "needs device",
    "import torch_musa\ntorch_musa.MUSAGraph().debug_dump()": "needs debug_path",
    # a stub that throws
    "call('musaThreadExchangeStreamCaptureMode', mode)": "is a stub that throws",
    "lib.musaMallocAsync(p, 1, s)": "musaMallocAsync is a stub that throws",
    "TABLE = {'musaMemPoolTrimTo': ()}": "has a stub that throws in its place",
    "import torch_musa\ntorch_musa.MUSAGraph().debug_dump('x')": "a stub that throws with a toolkit older than 4.2",
    # names of CUDA, and of nobody
    "import torch\ne = torch.cuda.Event()": "torch.cuda: this code runs on MUSA",
    "x = stream.cuda_stream": "attribute cuda_stream: only torch.cuda has it",
    "x = make(keep_graph=True)": "keyword keep_graph: only torch.cuda has it",
    "x = stream.musa_handle": "attribute musa_handle: nothing in torch_musa has it",
    "from operator import attrgetter\nraw = attrgetter('musa_raw')": "attribute musa_raw: nothing in torch_musa has it",
    "call('cudaMalloc', 1)": "cudaMalloc: CUDA's name",
    "call('cuLaunchKernel', 1)": "cuLaunchKernel: CUDA's name",
    "call('musaMallocEverything', 1)": "musaMallocEverything: no public source",
    "lib.muLaunchAnything(1)": "muLaunchAnything: no public source",
    "import os\nos.environ['MUSA_DEVICES']": "MUSA_DEVICES: torch_musa reads no such variable",
}

RIGHT = [
    "import torch_musa\nwith torch_musa.graph(musa_graph=torch_musa.MUSAGraph(), pool=p): pass",
    "import torch\ntorch.musa.get_device_properties(0).multi_processor_count",
    "import torch_musa\ng = torch_musa.MUSAGraph()\ng.capture_begin(pool=p, capture_error_mode='global')\ng.reset()",
    "import torch_musa\ntorch_musa._MUSAC._musa_releasePool(0, pool)",
    "import torch_musa\ntorch_musa.Stream(stream_id=1, device_index=0, device_type=20).musa_stream",
    "import torch_musa\ntorch_musa.current_stream().stream_id",
    "import torch_musa\ngetattr(torch_musa, 'nothing_like_it', None)",
    "import torch_musa\nhasattr(torch_musa, 'nothing_like_it')",
    "import torch_musa\ntry:\n    torch_musa.MUSAGraph().debug_dump('x')\nexcept RuntimeError:\n    pass",
    "def f(family):\n    with family.module.stream(family.module.Stream(0)): pass",
    "def f(family):\n    family.module.current_stream(0).synchronize()",
    "from operator import attrgetter\nraw = attrgetter('musa_stream')",
    "TABLE = {'musaMalloc': (), 'muLaunchKernel': ()}",
    "import os\nos.environ.get('MUSA_VISIBLE_DEVICES')",
    '"""musaMallocAsync, cudaMalloc and torch.cuda in a text are no use of them."""',
    "x = 'music' + mutex.muting",
]


@pytest.mark.parametrize("source", WRONG)
def test_a_planted_disagreement_is_found(source: str) -> None:
    assert any(WRONG[source] in one for one in found(source)), found(source)


@pytest.mark.parametrize("source", RIGHT)
def test_what_the_contract_allows_passes(source: str) -> None:
    assert found(source) == []


def test_a_name_is_found_where_it_is_bound_later_and_in_closures() -> None:
    source = (
        "import torch_musa\ndef f():\n    def g():\n        return s.nothing\n    s = torch_musa.Stream()\n    return g"
    )
    assert found(source) == ["torch_musa.core.stream.Stream has no nothing"]


def test_findings_say_where_and_which_contract(tmp_path: Path) -> None:
    (one,) = check("\nimport torch_musa\ntorch_musa.utilization\n", "backends/musa/x.py")
    assert str(one) == "backends/musa/x.py:3: torch_musa has no utilization (contract 2.7.1)"


def test_the_simulator_is_not_a_user(tmp_path: Path) -> None:
    for name in ("backends/musa/simulator/a.py", "backends/musa/b.py"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("import torch\ntorch.cuda.Event()\n")
    findings, files = check_folders(tmp_path)
    assert ([one.file for one in findings], files) == (["backends/musa/b.py"], 1)


def test_the_command_counts_and_fails(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tests/contract"]) in (0, 1)
    assert "disagreements with torch_musa 2.7.1" in capsys.readouterr().out


def test_every_symbol_that_the_contract_lacks_names_its_public_source() -> None:
    for name, source in SEEN_ELSEWHERE.items():
        assert name not in contract().symbols, f"{name} is in the contract itself"
        assert "/" in source
