"""``python -m benchmarks.ffn`` at sizes of a laptop: every arm runs and everything is reported."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import ffn

TINY = "--tokens 1 6 --hidden 32 --inner 32 --experts 4 --top-k 2 --layers 3 --distinct 2 --rounds 4 --reserve 0"


@pytest.mark.parametrize("more", [["--format", "bf16"], ["--format", "fp4", "--shared", "--by-layer"]])
def test_every_arm_runs_and_memory_is_told_by_parts(
    more: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ffn.main([*TINY.split(), *more, "--output", str(tmp_path / "out.json")])
    found = json.loads((tmp_path / "out.json").read_text())
    assert [row["tokens"] for row in found["rows"]] == [1, 6]
    for row in found["rows"]:
        assert min(row[arm] for arm in ("ladder", "replay", "worst", "eager")) > 0
        assert row["low"] <= row["ratio"] <= row["high"]
        assert row["way"] in ("bucket", "worst case", "eager")
    graphs = len(found["buckets"]) * (3 if "--by-layer" in more else 1)
    assert found["memory"]["graphs"] == graphs
    assert found["memory"]["ladder_workspace"] > 0
    assert found["statistics"]["replays"] + found["statistics"]["eager_items"] > 0
    out = capsys.readouterr().out
    assert "the ladder adds" in out
    assert "ladder/eager" in out
