"""The page of ``halma capture --html``: one file, no script, nothing fetched."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from itertools import accumulate
from typing import Any

_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP = 760, 300, 90, 40, 20
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 60rem; padding: 0 1rem; color: #1c2330; }
table { border-collapse: collapse; width: 100%; } td, th { padding: .2rem .6rem; text-align: right; }
th:first-child, td:first-child, td.why { text-align: left; } tr:nth-child(even) { background: #f3f5f8; }
svg text { font-size: 12px; fill: #445; } .shared { stroke: #1f6feb; } .apart { stroke: #d1601f; }
.budget { stroke: #b3261e; stroke-dasharray: 5 4; } polyline, line { fill: none; stroke-width: 2; }
.axis { stroke: #99a; stroke-width: 1; } circle { fill: #1f6feb; stroke: none; }
"""


def page(document: Mapping[str, Any]) -> str:
    """The report as HTML: a picture of memory over capture order, and the table."""
    title = f"{document['model']} on {document['backend']}: {document['captured']} graphs, {document['order']}"
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f"<style>{_STYLE}</style></head>\n<body><h1>{escape(title)}</h1>\n<p>{escape(_summary(document))}</p>\n"
        f"{_picture(document)}\n{_table(document['descriptors'])}\n</body></html>\n"
    )


def _summary(document: Mapping[str, Any]) -> str:
    text = (
        f"{document['kind']} session, evidence {document['evidence']}. {document['total_bytes']:,} bytes in all: "
        f"{document['workspace_bytes']:,} of workspace, shared by all graphs, and "
        f"{document['graph_bytes']:,} beyond it."
    )
    apart = document.get("unshared")
    if apart:
        text += f" With a workspace for each graph: {apart['total_bytes']:,} bytes, {apart['times']:g} times as many."
    return text


def _picture(document: Mapping[str, Any]) -> str:
    """An SVG: bytes held after each capture, beside what unshared graphs and the budget come to."""
    rows: Sequence[Mapping[str, Any]] = document["descriptors"]
    held = [row["held_bytes"] for row in rows]
    apart = list(accumulate(document["unshared"]["descriptors"])) if document.get("unshared") else []
    budget = document.get("budget_bytes") or 0
    # A budget far above everything else would press the lines flat.
    highest = max([*held, *apart, 1])
    highest = max(highest, budget if budget <= 2 * highest else 0) * 1.1

    def at(position: int, size: float) -> tuple[float, float]:
        step = (_WIDTH - _LEFT - 20) / max(len(rows) - 1, 1)
        return _LEFT + position * step, _HEIGHT - _BOTTOM - size / highest * (_HEIGHT - _BOTTOM - _TOP)

    def line(kind: str, sizes: Sequence[int]) -> str:
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in (at(i, size) for i, size in enumerate(sizes)))
        return f'<polyline class="{kind}" points="{points}"/>'

    parts = [_axes(highest, at)]
    if apart:
        parts.append(line("apart", apart))
        parts.append(_label(at(len(apart) - 1, apart[-1]), "a workspace each"))
    if budget and budget <= highest:
        parts.append(line("budget", [budget] * max(len(rows), 2)))
        parts.append(_label(at(len(rows) - 1, budget), "budget"))
    if held:
        parts.append(line("shared", held))
        parts.append(_label(at(len(held) - 1, held[-1]), "one workspace"))
    for position, row in enumerate(rows):
        x, y = at(position, row["held_bytes"])
        hint = f"{position + 1}. {row['descriptor']}: {row['held_bytes']:,} bytes held. {row['why_not']}"
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4"><title>{escape(hint)}</title></circle>')
    return (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="memory over capture order" '
        f'xmlns="http://www.w3.org/2000/svg">{"".join(parts)}</svg>'
    )


def _axes(highest: float, at: Any) -> str:
    left, floor = at(0, 0)
    parts = [f'<line class="axis" x1="{left}" y1="{floor}" x2="{_WIDTH - 20}" y2="{floor}"/>']
    for part in (0.25, 0.5, 0.75, 1.0):
        _, y = at(0, highest * part)
        parts.append(f'<line class="axis" x1="{left - 4}" y1="{y:.1f}" x2="{left}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{left - 8}" y="{y + 4:.1f}" text-anchor="end">{highest * part / 2**20:.2f} MiB</text>')
    parts.append(f'<text x="{_WIDTH / 2}" y="{_HEIGHT - 10}" text-anchor="middle">captures, in order</text>')
    return "".join(parts)


def _label(place: tuple[float, float], text: str) -> str:
    return f'<text x="{place[0]:.1f}" y="{place[1] - 8:.1f}" text-anchor="end">{escape(text)}</text>'


def _table(rows: Sequence[Mapping[str, Any]]) -> str:
    lines = ["<table><tr><th>descriptor</th><th>nodes</th><th>ms</th><th>bytes</th><th>held</th><th>why not</th></tr>"]
    for row in rows:
        cells = (row["nodes"], f"{row['milliseconds']:.1f}", f"{row['bytes']:,}", f"{row['held_bytes']:,}")
        numbers = "".join(f"<td>{cell}</td>" for cell in cells)
        lines.append(
            f'<tr><td>{escape(row["descriptor"])}</td>{numbers}<td class="why">{escape(row["why_not"])}</td></tr>'
        )
    return "\n".join([*lines, "</table>"])
