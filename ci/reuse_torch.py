"""Let a virtual environment see the packages of the Python that runs this: ``python ci/reuse_torch.py VENV_PYTHON``.

For machines whose torch came with the image (a vendor's build, several GB). ``--system-site-packages`` does not do:
where this Python is itself in a virtual environment, it would show the one below.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

NAME = "zz_reuse_torch.pth"


def main() -> int:
    """Write the .pth file; what the environment installs itself still comes first."""
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        print(f"REUSE_TORCH=1, but {sys.executable} has no torch", file=sys.stderr)
        return 1
    source = Path(found.origin).parent.parent
    ask = "import sysconfig; print(sysconfig.get_path('purelib'), sysconfig.get_python_version())"
    purelib, version = subprocess.check_output([sys.argv[1], "-c", ask], text=True).split()
    mine = f"{sys.version_info.major}.{sys.version_info.minor}"
    if version != mine:
        print(f"REUSE_TORCH=1, but {sys.argv[1]} is Python {version} and torch is for {mine}", file=sys.stderr)
        return 1
    (Path(purelib) / NAME).write_text(f"{source}\n", encoding="utf-8")
    print(f"torch is taken from {source}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
