"""What mcc and MTRTC are told alike."""

from __future__ import annotations

from collections.abc import Mapping

from halma.hal.backend import KernelSource
from halma.hal.errors import KernelError


def arch_of(capability: tuple[int, int]) -> str:
    """``mp_31`` for (3, 1)."""
    return "mp_{}{}".format(*capability)


def macros(defines: Mapping[str, str]) -> list[str]:
    """Definitions, in an order of their own."""
    return [f"-D{name}={value}" if value else f"-D{name}" for name, value in sorted(defines.items())]


def does_not_compile(source: KernelSource, compiler: str, arch: str, log: str) -> KernelError:
    """The error for a source that the compiler refuses."""
    return KernelError(
        f"kernel source {source.name!r} does not compile",
        asked=f"{compiler.splitlines()[0] if compiler else 'a compiler'} for {arch}",
        found=log.strip().splitlines(),
        do="mend the source; nothing is retried in another way",
    )
