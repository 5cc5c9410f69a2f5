"""What routes need of this process, beside what they need of their call; asked once a process."""

from __future__ import annotations

from functools import cache

from halma.backends.musa import runtime
from halma.backends.musa.seam import NoCompiler, toolchain


@cache
def no_dialect() -> str | None:
    """Why the portable dialect's kernels cannot be had, or None."""
    missing = runtime.why_missing("musart", "musa")
    if missing is not None:
        return missing
    try:
        toolchain().compiler()
    except NoCompiler as error:
        return str(error)
    return None


@cache
def no_triton() -> str | None:
    """Why Triton's kernels cannot be had, or None."""
    try:
        found = triton_target()
    except Exception as error:  # a Triton without a driver for the device has errors of its own
        return f"Triton has no driver for this device: {type(error).__name__}: {error}"
    wanted = toolchain().triton_targets
    return None if found in wanted else f"Triton's device is called {found!r} here, not {' or '.join(wanted)}"


def triton_target() -> str:
    """What the installed Triton calls its device.

    Raises:
        Exception: there is no Triton, or it has no driver for any device.
    """
    from triton.runtime import driver  # pyright: ignore[reportMissingImports]

    return str(driver.active.get_current_target().backend)
