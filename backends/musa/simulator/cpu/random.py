"""Random numbers of the simulated device: a generator of its own, apart from the host's. A replay goes on with it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

generator = torch.Generator()
"""What ops of the device use that are given none."""


def functions() -> dict[str, Callable[..., Any]]:
    """torch_musa's names for it (torch_musa/core/random.py)."""
    return {
        "manual_seed": manual_seed,
        "manual_seed_all": manual_seed,
        "initial_seed": lambda: generator.initial_seed(),
        "seed": lambda: generator.seed() and None,
        "seed_all": lambda: generator.seed() and None,
        "get_rng_state": lambda device="musa": generator.get_state(),
        "set_rng_state": lambda new_state, device="musa": generator.set_state(new_state) and None,
    }


def manual_seed(seed: int) -> None:
    """Seed it."""
    generator.manual_seed(int(seed))
