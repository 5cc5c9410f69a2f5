"""``python -m halma.hal.testing.protocol [--variant NAME] [--nightly]``."""

from __future__ import annotations

import sys

from halma.hal.testing.protocol.report import main

sys.exit(main())
