"""What a test of a backend needs: the pytest plugin (options, markers, reports) and counted checks.

Nothing here imports torch when it is loaded: the plugin is a ``pytest11`` entry point, so every pytest of an
environment that has halma loads it, also where torch is broken.
"""

from __future__ import annotations

from halma.hal.testing.counting import check

__all__ = ["check"]
