"""The README's example of a capture, run as it stands, and the one-line entry points that it uses."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import halma
from halma.hal.errors import BackendError, CaptureError, StaleInputError
from halma.hal.graph.breakable import CaptureMode
from halma.hal.graph.inputs import InputSet
from halma.hal.testing.forks import script

README = Path(__file__).parents[3] / "README.md"
SECTION = "## Capturing your own function"


def example() -> str:
    """The section's one code block."""
    section = README.read_text(encoding="utf-8").partition(SECTION)[2].partition("\n## ")[0]
    (block,) = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    return block


@pytest.mark.parametrize(
    ("environment", "captured"),
    [({}, 4), ({"HALMA_GRAPH": "0"}, 0), ({"HALMA_CHECKED": "1"}, 4)],
    ids=["captured", "eager", "checked"],
)
def test_the_example_prints_what_it_says(environment: dict[str, str], captured: int, tmp_path: Path) -> None:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("HALMA_")}
    done = script(example(), environment=clean | environment, folder=tmp_path).end()
    assert done.code == 0, done.err
    (promised,) = re.findall(r"print\(y.*#\s*(\[.*\])", example())
    first, head, *rows = done.out.splitlines()
    assert first == promised
    assert head.startswith(f"persistent session on cpu: {captured} of 4 descriptors captured, ")
    assert len(rows) == 4 and all(("switched off" in row) is (captured == 0) for row in rows)


def test_the_example_fits_a_terminal() -> None:
    assert max(map(len, example().splitlines())) <= 110


def test_entry_points_take_a_backend_or_its_name() -> None:
    backend = halma.backend("cpu")
    by_name = halma.persistent_input("x", (2, 3), torch.int64, backend="cpu")
    by_value = halma.persistent_input("y", (2, 3), torch.int64, pad=7, backend=backend)
    assert by_name.tensor.tolist() == [[0] * 3] * 2 and by_value.tensor.tolist() == [[7] * 3] * 2
    with halma.session("scratch", backend="cpu", inputs=[by_name, by_value]) as session:
        assert session.backend is backend and session.mode is CaptureMode.FULL and session.kind == "scratch"
    inputs = InputSet([by_name])
    with halma.session("scratch", backend=backend, inputs=inputs, breaks=True, strict=True) as session:
        assert session.mode is CaptureMode.PIECEWISE and session.strict
        assert session.inputs_of(halma.Descriptor("decode", 1)) is inputs


@pytest.mark.parametrize("checked", ["0", "1"])
def test_the_workspace_of_a_session_is_checked_where_the_settings_say_so(
    checked: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HALMA_CHECKED", checked)
    with halma.session("scratch", backend="cpu") as session:
        assert session.workspace.checked is (checked == "1")


def test_what_entry_points_refuse() -> None:
    with pytest.raises(BackendError, match='no backend called "cpi"'):
        halma.session(backend="cpi")
    with pytest.raises(CaptureError, match="one of persistent, scratch"):
        halma.session("keep", backend="cpu")
    with pytest.raises(CaptureError, match="a capture budget of 0 bytes"):
        halma.session(backend="cpu", budget=0)
    with pytest.raises(CaptureError, match="cannot hold its pad value"):
        halma.persistent_input("x", (2,), torch.uint8, pad=-1, backend="cpu")
    for shape in ((), (-1, 3)):
        with pytest.raises(CaptureError, match="input 'x' must have rows"):
            halma.persistent_input("x", shape, torch.float32, backend="cpu")
    with pytest.raises(CaptureError, match="the ladder of decode is empty"):
        halma.ladder(decode=0)
    x = halma.persistent_input("x", (2,), torch.float32, backend="cpu")
    with pytest.raises(CaptureError, match="input 'x' takes tensors"):
        x.refresh([1.0])  # pyright: ignore[reportArgumentType]
    with pytest.raises(AttributeError, match="no attribute 'sesion'"):
        halma.sesion  # noqa: B018


def test_a_session_of_one_line_replays_and_refuses_stale_rows() -> None:
    x = halma.persistent_input("x", (4,), torch.float32, backend="cpu")
    with halma.session(backend="cpu", inputs=[x]) as session:
        for one in halma.ladder(decode=4):
            rows = x.prefix(one.num_requests)
            session.capture(one, lambda rows=rows: rows + 1)
    assert session.descriptors == halma.ladder(decode=4)
    wanted = halma.fit(session.descriptors, role="decode", num_requests=3)
    assert wanted is not None and session.replay(wanted, x=torch.ones(3)).tolist() == [2, 2, 2, 1]
    with pytest.raises(StaleInputError, match="'x' was not refreshed"):
        session.replay(wanted)


def test_every_name_that_is_offered_is_there() -> None:
    assert all(hasattr(halma, name) for name in halma.__all__)
    assert set(halma.__all__) <= set(dir(halma))


@pytest.mark.parametrize("name", ["ladder", "session", "persistent_input"])
def test_looking_at_an_entry_point_imports_no_torch(name: str) -> None:
    code = f"import sys, halma; halma.{name}; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "False", done.stderr
