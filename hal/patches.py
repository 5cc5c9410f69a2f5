"""Whether somebody replaced parts of torch in this process (B9).

We patch nothing ourselves. Compatibility layers (torchada) put a module of their own in the place of one of torch's,
and then its functions answer for another device. Recognised by where the module came from, so no layer and no
vendor has to be known by name. Torch is not imported for this: what is not loaded is not replaced.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from types import ModuleType


def replaced_modules(modules: Mapping[str, object] | None = None, package: str = "torch") -> tuple[str, ...]:
    """Submodules of ``package`` that are not the ones it was shipped with, each with what stands there.

    Args:
        modules: loaded modules by name; default: this process's.
        package: the package to look at.
    """
    modules = sys.modules if modules is None else modules
    root = modules.get(package)
    location = getattr(root, "__file__", None)
    if not isinstance(root, ModuleType) or not isinstance(location, str):
        return ()
    home = os.path.dirname(location)
    found: list[str] = []
    for name in sorted(modules):
        parent, _, child = name.rpartition(".")
        if parent != package or child.startswith("_") or not _ships(home, child):
            continue  # a device family's own addition (torch.<device>) replaces nothing
        attribute = vars(root).get(child, modules[name])
        stand_in = next((m for m in (modules[name], attribute) if not _is_own(home, package, m)), None)
        if stand_in is not None:
            found.append(f"{name} is {_describe(stand_in)}")
    return tuple(found)


def _ships(home: str, child: str) -> bool:
    path = os.path.join(home, child)
    return os.path.isfile(path + ".py") or os.path.isfile(os.path.join(path, "__init__.py"))


def _is_own(home: str, package: str, module: object) -> bool:
    """Whether the module's code is the package's own. A stand-in may answer for anything it is asked, its
    ``__file__`` included, so its namespace and its type are looked at instead."""
    kind = type(module)
    if kind is not ModuleType:
        return kind.__module__.split(".")[0] == package  # torch.backends is of a class that torch defines
    location = vars(module).get("__file__")
    return isinstance(location, str) and location.startswith(home + os.sep)


def _describe(module: object) -> str:
    kind = type(module)
    source = getattr(module, "__dict__", {}).get("__file__")
    what = "a module" if kind is ModuleType else f"a {kind.__module__}.{kind.__qualname__}"
    return f"{what} from {source}" if isinstance(source, str) else f"{what} without a file"
