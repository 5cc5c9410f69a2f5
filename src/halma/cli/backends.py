"""``halma backends``: which there are, which can be used, and which would be."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from halma.cli.output import emit_json, print_table
from halma.hal.errors import BackendError
from halma.hal.patches import replaced_modules
from halma.hal.registry import AUTO, Status, default_registry
from halma.hal.settings import settings


def backends(
    backend: Annotated[str | None, typer.Option(help="Ask about this one; default: HALMA_BACKEND, else auto.")] = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """List backends with verdict and reason; a star marks the one that would be used.

    Exit code 0, unless one was asked for (--backend, HALMA_BACKEND) and cannot be used.
    """
    registry = default_registry()
    asked = backend or settings().backend
    if asked is not None and asked != AUTO:
        registry.status(asked)  # an unknown name is refused with the list of names; no table on top of it
    statuses = registry.statuses()
    chosen, refusal = "", None
    try:
        chosen = registry.choose(backend)[0].name
    except BackendError as error:
        refusal = error
    patched = replaced_modules()
    if json:
        emit_json(
            {
                "schema": "halma.backends/1",
                "asked": asked or AUTO,
                "chosen": chosen or None,
                "refusal": None if refusal is None else refusal.what,
                "patched": patched,
                "backends": [{**as_json(status), "chosen": status.name == chosen} for status in statuses],
            }
        )
    else:
        rows = [("*" if status.name == chosen else "", *_row(status)) for status in statuses]
        print_table(("", "backend", "verdict", "reason", "evidence", "version", "distribution"), rows)
        for line in patched:
            print(f"torch was patched: {line}")
    if refusal is None:
        return
    if asked is not None:
        raise refusal
    if not json:
        print("\n".join(("", f"none is chosen: {refusal.what}", *refusal.do)))


def as_json(status: Status) -> dict[str, Any]:
    """A backend's status as plain data."""
    spec = status.spec
    return {
        "name": status.name,
        "usable": status.usable,
        "reason": status.reason,
        "accelerator": None if spec is None else spec.accelerator,
        "simulated": None if spec is None else spec.simulated,
        "evidence": None if spec is None else spec.evidence,
        "plugins": [
            {"distribution": plugin.distribution, "version": plugin.version, "entry_point": plugin.value}
            for plugin in status.plugins
        ],
        "detail": dict(status.detail),
    }


def _row(status: Status) -> tuple[str, ...]:
    return (
        status.name,
        "usable" if status.usable else "not usable",
        status.reason,
        "" if status.spec is None else status.spec.evidence,
        ", ".join(plugin.version for plugin in status.plugins),
        ", ".join(plugin.distribution for plugin in status.plugins),
    )
