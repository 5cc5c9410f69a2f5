"""``halma capture``: the report, the picture, and what is refused."""

from __future__ import annotations

import json
import xml.etree.ElementTree as xml
from pathlib import Path
from typing import Any

import pytest

from halma.cli.capture import byte_count
from halma.cli.capture_page import page
from halma.hal.errors import RequestError
from tests.cpu.cli.conftest import Halma

SMALL = ("capture", "--backend", "cpu", "--max-requests", "2", "--context", "200", "--chunk", "8")


def report(halma: Halma, *arguments: str) -> dict[str, Any]:
    done = halma(*SMALL, "--json", *arguments)
    assert done.code == 0, done.err
    return json.loads(done.out)


def test_the_report_as_json(halma: Halma) -> None:
    found = report(halma)
    assert found["schema"] == "halma.capture/1" and (found["backend"], found["evidence"]) == ("cpu", "cpu")
    assert (found["model"], found["kind"], found["order"]) == ("tiny-v4", "persistent", "descending")
    assert found["total_bytes"] == found["workspace_bytes"] > 0 and found["graph_bytes"] == 0
    rows = found["descriptors"]
    assert found["captured"] == len(rows) == 3
    assert {(row["role"], row["num_requests"]) for row in rows} == {("decode", 1), ("decode", 2), ("prefill", 1)}
    for row in rows:
        assert row["nodes"] > 100 and row["milliseconds"] > 0 and row["bytes"] == 0 and row["why_not"] == ""
        assert row["allocations"] == 0 and row["held_bytes"] == found["total_bytes"]


@pytest.mark.invariant("G17")
@pytest.mark.parametrize("order", ["ascending", "shuffled(7)"])
def test_no_order_changes_the_memory(halma: Halma, order: str) -> None:
    first, other = report(halma), report(halma, "--order", order)
    assert other["order"] == order
    assert abs(other["total_bytes"] - first["total_bytes"]) <= 0.01 * first["total_bytes"]
    assert sorted(row["descriptor"] for row in other["descriptors"]) == sorted(
        row["descriptor"] for row in first["descriptors"]
    )
    tokens = [row["num_tokens"] for row in other["descriptors"]]
    assert tokens == sorted(tokens) or order != "ascending"


def test_what_sharing_saves_is_a_figure(halma: Halma) -> None:
    found = report(halma, "--scratch", "--compare-unshared")
    apart = found["unshared"]
    assert found["kind"] == "scratch" and len(apart["descriptors"]) == len(found["descriptors"])
    assert apart["total_bytes"] == sum(apart["descriptors"]) == found["total_bytes"] + apart["saved_bytes"]
    assert apart["total_bytes"] == apart["workspace_bytes"] + apart["pool_bytes"] + apart["graph_bytes"]
    assert apart["allocating"] == {}, "no program allocates on this backend; where one does its ops are listed"
    assert max(apart["descriptors"]) <= found["total_bytes"] < apart["total_bytes"] and apart["times"] > 1.2


@pytest.mark.parametrize(
    ("arguments", "environment", "reason"),
    [
        (["--budget", "64KiB"], {}, "the budget is 65,536 bytes"),
        (["--reserve", "900000GiB"], {}, "are reserved"),
        ([], {"HALMA_GRAPH": "0"}, "capture is switched off"),
    ],
)
def test_why_not_is_said_of_each(
    halma: Halma,
    arguments: list[str],
    environment: dict[str, str],
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    found = report(halma, *arguments)
    assert found["captured"] == 0 and len(found["descriptors"]) == 3
    assert all(reason in row["why_not"] and row["nodes"] == 0 for row in found["descriptors"])


def test_one_role_is_switched_off(halma: Halma, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HALMA_GRAPH_PREFILL", "0")
    done = halma(*SMALL)
    lines = done.out.splitlines()
    assert done.code == 0 and "2 of 3 captured" in lines[0]
    assert [line.endswith("capture of prefill is switched off") for line in lines if line.startswith("prefill")] == [
        True
    ]
    assert any(line.startswith("workspace  ") and "shared by all" in line for line in lines)


def test_the_page_is_self_contained(halma: Halma, tmp_path: Path) -> None:
    path = tmp_path / "memory.html"
    budget = str(report(halma)["total_bytes"])
    found = report(halma, "--html", str(path), "--compare-unshared", "--budget", budget)
    text = path.read_text(encoding="utf-8")
    assert "http://www.w3.org/2000/svg" in text and text.count("http") == 1
    assert "<script" not in text and "<link" not in text
    picture = xml.fromstring(text[text.index("<svg") : text.index("</svg>") + 6])
    kinds = [line.get("class") for line in picture.iter("{http://www.w3.org/2000/svg}polyline")]
    assert kinds == ["apart", "budget", "shared"]
    points = len(list(picture.iter("{http://www.w3.org/2000/svg}circle")))
    assert points == len(found["descriptors"]) == text.count('<td class="why">')
    assert f"{found['total_bytes']:,} bytes in all" in text


def test_the_page_escapes_what_it_shows() -> None:
    row = {"descriptor": "a<b", "nodes": 0, "milliseconds": 0.0, "bytes": 0, "held_bytes": 0, "why_not": "x & y"}
    sums = {"captured": 0, "total_bytes": 0, "workspace_bytes": 0, "graph_bytes": 0}
    text = page(
        {
            "model": "<m>",
            "backend": "cpu",
            "evidence": "cpu",
            "kind": "scratch",
            "order": "o",
            **sums,
            "descriptors": [],
        }
    )
    assert "&lt;m&gt;" in text and "<m>" not in text
    text = page(
        {
            **{"model": "m", "backend": "cpu", "evidence": "cpu", "kind": "scratch", "order": "o", **sums},
            "descriptors": [row],
        }
    )
    assert "a&lt;b" in text and "x &amp; y" in text


@pytest.mark.parametrize(
    ("arguments", "what", "do"),
    [
        (["--sizes", "1,16"], "decode(16 tokens, 16 requests) is wider", "leave out sizes above 2"),
        (["--sizes", "1,2,2"], "decode(2 tokens, 2 requests) is in the ladder twice", "drop the duplicate"),
        (["--sizes", "1,x"], "sizes must be integers", "--sizes 1,2,4"),
        (["--budget", "0"], "holds nothing", "leave the budget out"),
        (["--budget", "much"], "--budget takes a number of bytes", "--budget 512MiB"),
        (["--reserve=-1"], "--reserve takes a number of bytes", "--reserve 512MiB"),
        (["--order", "up"], "no order of capture called 'up'", "--order descending"),
        (["--max-requests", "0"], "a ladder needs a request", "1 or more"),
        (["--context", "100000000"], "longer than the context", "shorten"),
        (["--model", "nope"], 'no model called "nope"', "tiny-v4"),
        (["--backend", "cpi"], 'no backend called "cpi"', "--backend cpu"),
        (["--html", "/nonexistent/folder/page.html"], "the page cannot be written", "--html"),
    ],
)
def test_bad_input_is_refused_with_what_to_do(halma: Halma, arguments: list[str], what: str, do: str) -> None:
    done = halma(*SMALL, *arguments)
    assert done.code == 2 and done.out == ""
    assert what in done.err and do in done.err


@pytest.mark.parametrize(
    ("text", "bytes_"),
    [
        ("0", 0),
        ("4096", 4096),
        ("1KiB", 1024),
        ("1kb", 1000),
        ("512MiB", 1 << 29),
        ("1.5GiB", 3 << 29),
        ("2T", 2 * 10**12),
    ],
)
def test_bytes_with_suffixes(text: str, bytes_: int) -> None:
    assert byte_count("--budget", text) == bytes_


@pytest.mark.parametrize("text", ["", "MiB", "1 2", "-1", "1XB", "0x10"])
def test_what_is_no_number_of_bytes(text: str) -> None:
    with pytest.raises(RequestError, match="takes a number of bytes"):
        byte_count("--budget", text)
