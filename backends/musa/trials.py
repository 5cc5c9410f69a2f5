"""Trials of a MUSA device that its properties and documents leave open."""

from __future__ import annotations

from typing import Final

import torch

from halma.backends.musa.device import MusaDevice, attribute
from halma.backends.musa.graphs import MODES, MusaRecipe
from halma.backends.musa.seam import toolchain
from halma.backends.torch_device.trials import Trials
from halma.hal.capabilities import UNKNOWN, Unknown

WARP_WIDTHS: Final = {(1, 0): 128, (2, 1): 128, (2, 2): 128, (3, 1): 32}
"""Capability -> threads of a warp, from MooreThreads/torch_musa
torch_musa/csrc/aten/ops/musa/TensorModeKernel.mu and vllm-musa's csrc/musa/gemv.mu."""
FP8_FROM: Final = (3, 1)


class MusaTrials(Trials):
    """The shared trials, and what depends on the architecture."""

    def allocating_capture(self) -> bool:
        """An op makes its result in the graphs' pool, which has no room yet: the allocator goes to the driver."""
        x = torch.zeros(3 << 20, device=self.device.torch_device)
        made: list[torch.Tensor] = []
        templates = self._capture(lambda: made.append(x + 1.0))
        self._replayed(templates)
        return float(made[0][-1]) == 1.0

    def warp_width(self, device: MusaDevice) -> int | Unknown:
        """The architecture's, unless the runtime says otherwise: then nobody knows (ggml-org/llama.cpp#12445)."""
        told = attribute("warp_size", device.index)
        known = WARP_WIDTHS.get(device.capability) if toolchain().dialect == "musa" else told
        if known is None:
            self.notes["warp_width"] = "nobody says how wide a warp of {}.{} is".format(*device.capability)
            return UNKNOWN
        if told is not None and told != known:
            self.notes["warp_width"] = f"the runtime says {told}, kernels of this architecture are compiled for {known}"
            return UNKNOWN
        return known

    def fp8(self, device: MusaDevice) -> bool | Unknown:
        """Native fp8 is there from mp_31 on; then its bits are looked at."""
        if toolchain().dialect == "musa" and device.capability < FP8_FROM:
            return False
        return self.ask("fp8_e4m3fn", self.fp8_e4m3fn)


def choose_mode(trials: MusaTrials, recipe: MusaRecipe) -> bool | Unknown:
    """Set the capture mode, and say whether this device captures at all.

    The first mode in which a capture runs nothing, replays, and may allocate; where none may allocate, the first in
    which it works otherwise, and programs whose ops make results of their own are refused by the driver.
    """
    answer, fallback = UNKNOWN, None
    for mode in MODES:
        recipe.mode = mode
        works = trials.ask(f"graph_capture in mode {mode}", trials.graph_capture)
        if works is not True:
            answer = works if answer is UNKNOWN else answer
            continue
        if trials.ask(f"allocation in a capture in mode {mode}", trials.allocating_capture) is True:
            return True
        fallback = fallback or mode
    recipe.mode = fallback or MODES[0]
    if fallback is not None:
        trials.notes["allocation in a capture"] = "the driver refuses it in every mode: plan every result"
        return True
    return answer
