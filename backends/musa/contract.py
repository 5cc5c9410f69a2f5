"""Which torch_musa this backend was written against. Imports nothing, so that a probe may ask."""

from __future__ import annotations

from typing import Final

CONTRACT: Final = "2.7.1"
"""The release of torch_musa whose names and signatures are recorded in tests/contract and compared with every use."""

EVIDENCE: Final = f"contract {CONTRACT}"
"""How results say that something is known from names and signatures alone."""


def version_warning(installed: str | None) -> str | None:
    """What ``halma doctor`` says about an installed torch_musa, or None for the recorded release.

    Args:
        installed: its ``__version__``; a local part (``+musa4.3``) does not count. None where it has none.
    """
    if installed is None:
        return f"torch_musa does not say its version; the backend is written against {CONTRACT} ({EVIDENCE})"
    if installed.partition("+")[0] == CONTRACT:
        return None
    return (
        f"torch_musa {installed} is installed, the backend is written against {CONTRACT}: its names and signatures are "
        f"checked for {CONTRACT} only ({EVIDENCE})"
    )
