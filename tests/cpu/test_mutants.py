"""Take a guard away, and the test that names its rule must go red. Each mutant runs in a copy of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCOPE, LADDER, GRAPH = "hal/graph/scope.py", "hal/graph/ladder.py", "hal/graph/breakable.py"
BREAKS, CELLS, FORKS, RETIRE = (f"hal/graph/{name}.py" for name in ("breaks", "cells", "forks", "retire"))
SCOPE_TESTS, RULES = "tests/cpu/graph/test_scope.py", "tests/cpu/model/test_graph_rules.py"
SEAM, OUTCOMES, USERS, BREAK_TESTS, CELL_TESTS, FORK_TESTS = (
    f"src/halma/hal/testing/conformance/test_{name}.py"
    for name in ("seam", "outcomes", "users", "breaks", "cells", "forks")
)
SESSION, STAGES, EXECUTABLES = "hal/graph/session.py", "hal/graph/capturing.py", "hal/graph/executables.py"
BUDGET, AGREEMENT = "hal/graph/budget.py", "hal/graph/agreement.py"
SUITE = "src/halma/hal/testing/conformance"
BUDGET_TESTS, EXECUTABLE_TESTS = "tests/cpu/graph/test_budget.py", "tests/cpu/graph/test_executables.py"

MUTANTS = {
    "G1-replay-checks-segments": (GRAPH, "if len(self.segments) != len(self.breaks) + 1:", "if False:", SEAM),
    "G1-break-never-entered": (SCOPE, "if self._unentered:", "if False:", SEAM),
    "G2-nesting": (SCOPE, "if outer is None:", "if True:", SEAM),
    "G2-container": (SCOPE, "if not self.graph.empty:", "if False:", SEAM),
    "G2-other-threads": (SCOPE, "if open_scopes:", "if False:", SEAM),
    "G3-swallowed-exception": (
        SCOPE,
        "if self.first_error is None:\n            self.first_error = error",
        "pass",
        OUTCOMES,
    ),
    "G3-hidden-by-a-later-one": (SCOPE, "if first is not None and not _shows(error, first):", "if False:", OUTCOMES),
    "G3-failed-is-not-readable": (GRAPH, "if self.outcome is Outcome.FAILED:", "if False:", OUTCOMES),
    "G3-inert-is-not-captured": (SCOPE, "if self.active else Outcome.INERT", "", OUTCOMES),
    "G3-break-after-failure": (
        SCOPE,
        "if self.first_error is not None:\n            raise Cap",
        "if False:\n            raise Cap",
        OUTCOMES,
    ),
    "G3-abandon": (
        GRAPH.replace("breakable", "scope"),
        "graphs.abandon(self.stream)\n            raise",
        "raise",
        OUTCOMES,
    ),
    "G3-workspace-reset": (SCOPE, "self.workspace.reset()", "pass", OUTCOMES),
    "G5-full-refuses": (
        SCOPE,
        "if self.mode is CaptureMode.FULL:\n            raise",
        "if False:\n            raise",
        SEAM,
    ),
    "G6-raw-return": (BREAKS, "    if result is None:\n        return\n", "    return\n", CELL_TESTS),
    "G6-write-back": (CELLS, "tensor.copy_(fresh)", "pass", CELL_TESTS),
    "G6-same-form": (CELLS, "if (tensor.dtype, tensor.shape, tensor.device) != (", "if None in (", CELL_TESTS),
    "G6-keys": (CELLS, "if fresh.keys() != destination.keys():", "if False:", CELL_TESTS),
    "G6-one-cell-a-break": (SCOPE, "if known is not None:", "if False:", CELL_TESTS),
    "G6-outside-host": (BREAKS, "if _is_view(func):", "if True:", CELL_TESTS),
    "G7-inputs-pinned": (
        BREAKS,
        "HostCall(fn, args, kwargs,",
        "HostCall(fn, args, __import__('weakref').WeakValueDictionary(kwargs),",
        BREAK_TESTS,
    ),
    "G8-auto-join": (SCOPE, "self.forks.join_all(self.stream, self.graph.backend.device)", "pass", FORK_TESTS),
    "G8-join-order": (FORKS, "            stream.record(event)\n            main.wait(event)\n", "", FORK_TESTS),
    "G8-undeclared": (
        "backends/cpu/recorder.py",
        "for stream in self.clock.unjoined():",
        "for stream in ():",
        FORK_TESTS,
    ),
    "G8-break-on-a-side-stream": (SCOPE, "if current != self._home:", "if False:", FORK_TESTS),
    "G9-events": ("backends/cpu/streams.py", "if event.clock is not clock or", "if None is not None or", FORK_TESTS),
    "G22-deferred": (RETIRE, "if open_scopes or open_captures:", "if False:", USERS),
    "G22-dropped-graphs": (GRAPH, "weakref.finalize(self, _retire_all,", "(lambda *_: id)(self, _retire_all,", USERS),
    "G22-lease": (RETIRE, "if use.user is None:", "if True:", USERS),
    "G22-streams": (RETIRE, "if last is not None and last != stream:", "if False:", USERS),
    "G23-empty": (SCOPE, "if not self.allow_empty:", "if False:", SEAM),
    "W6-lane-kept-until-its-readers": (
        FORKS,
        "        self.joined = True\n        forks",
        "        self.joined = True\n        self.workspace.release_lane(self.stream.name)\n        forks",
        FORK_TESTS,
    ),
    "G15-key": (
        "hal/graph/descriptor.py",
        '    variant: str = ""\n',
        '    variant: str = field(default="", compare=False)\n',
        f"{SUITE}/test_session.py",
    ),
    "G24-grad-mode": (GRAPH, "if mode != self.grad_mode:", "if False:", SEAM),
    "G4-off-still-captures": (
        "models/deepseek_v4/runner.py",
        "GraphSwitch(self.graph, self.eager_roles)",
        "GraphSwitch(True, self.eager_roles)",
        RULES,
    ),
    "G4-role-still-captures": (
        "hal/settings.py",
        "if role in self.roles_off:",
        "if False:",
        "tests/cpu/graph/test_role_switches.py",
    ),
    "G16-exact-maximum": (
        "hal/graph/ladder.py",
        "if max_requests not in chosen:",
        "if False:",
        f"{SUITE}/test_ladder.py",
    ),
    "G18-planned-by-the-first": (
        SESSION,
        'ordered(wanted if plan is None else plan, "descending")',
        "ordered(wanted, order)[:1]",
        f"{SUITE}/test_session.py",
    ),
    "G19-scratch-on-the-caller's-workspace": (
        SESSION,
        'workspace.sibling() if kind == "scratch" else workspace',
        "workspace",
        f"{SUITE}/test_session.py",
    ),
    "G20-budget": (
        BUDGET,
        "if self.limit is not None and held + predicted > self.limit:",
        "if False:",
        BUDGET_TESTS,
    ),
    "G20-reserve": (BUDGET, "if memory.free - predicted < self.reserve:", "if False:", BUDGET_TESTS),
    "G20-negative-cache": (SESSION, "if known is not None and known.why_not:", "if False:", BUDGET_TESTS),
    "G21-recycling": (
        EXECUTABLES,
        "while self.limit is not None and len(self._live) >= self.limit:",
        "while False:",
        EXECUTABLE_TESTS,
    ),
    "G21-refused-beforehand": (
        STAGES,
        "refusal = refusal or self.executables.refusal(self._most_segments)",
        "pass",
        EXECUTABLE_TESTS,
    ),
    "G26-failure": (
        AGREEMENT,
        "failed = [rank for rank, other in enumerate(votes) if other.error]",
        "failed = []",
        "tests/cpu/graph/test_agreement.py::test_the_first_difference_is_named_with_its_rank",
    ),
    "G26-difference": (
        AGREEMENT,
        "if difference is not None:",
        "if False:",
        "tests/cpu/graph/test_agreement.py::test_the_first_difference_is_named_with_its_rank",
    ),
    "W1-growth": (
        "hal/workspace.py",
        '        if self.sealed:\n            raise self._refusal(scope, shape, dtype, "the plan ends',
        '        if False:\n            raise self._refusal(scope, shape, dtype, "the plan ends',
        "tests/cpu/hal/test_workspace.py",
    ),
    "W5-raw-arithmetic": (
        "backends/cpu/recorder.py",
        "node.raw = self.workspace.in_op == 0",
        "node.raw = False",
        RULES,
    ),
    "G11-baked": ("hal/graph/baked.py", "if not _same(x, y):", "if False:", RULES),
    "M5-stop": (
        "models/deepseek_v4/engine.py",
        "if token in generation.request.stop:",
        "if False:",
        "tests/cpu/model/test_engine.py::test_a_stop_token_ends_the_request_there",
    ),
    "M9-pages": (
        "models/deepseek_v4/engine.py",
        'return f"{need} pages needed, {len(self._free_pages)} free" if need',
        'return "" if need',
        "tests/cpu/model/test_engine.py::test_a_request_without_pages_waits_with_its_reason_and_the_running_one_is_unharmed",
    ),
    "K7-linear": (
        "ops/linear.py",
        "    elif bmm_equals_mv(matrix.shape[0], matrix.shape[1], x.dtype):",
        "    elif torch.mm(x, matrix.t(), out=out) is not None:\n"
        "        return\n    elif bmm_equals_mv(matrix.shape[0], matrix.shape[1], x.dtype):",
        "tests/cpu/ops/test_linear.py",
    ),
}


@pytest.mark.nightly
@pytest.mark.mutant
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", MUTANTS)
def test_the_mutant_is_noticed(name, tmp_path):
    file, old, new, tests = MUTANTS[name]
    for folder in ("hal", "backends", "ops", "models", "src", "tests", "benchmarks"):
        shutil.copytree(ROOT / folder, tmp_path / folder, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    path = tmp_path / file
    text = path.read_text()
    assert old in text, f"{file} no longer holds the guard of {name}: bring this table up to date"
    text = text.replace(old, new)
    if "field(" in new and "import field" not in text:
        text = text.replace("from dataclasses import dataclass", "from dataclasses import dataclass, field")
    path.write_text(text)
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", "not nightly", tests],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path / "src"), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )
    assert run.returncode == 1 and " failed" in run.stdout, run.stdout[-2000:]
