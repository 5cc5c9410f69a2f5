"""What a backend wants free beside a program: at loading, before the workspace, and in every capture."""

from __future__ import annotations

from typing import Any

import pytest

import halma
from halma.hal.backend import MemoryInfo
from halma.hal.decisions import decisions
from halma.hal.errors import ModelError
from halma.hal.policy import Guard, Headroom
from halma.models.deepseek_v4.load import load_v4
from halma.models.deepseek_v4.profiling import scratch
from halma.models.deepseek_v4.runner import RunnerOptions, V4Runner
from tests.cpu.model.small import small_model

MIB = 1 << 20
OPTIONS = RunnerOptions(max_context=64, chunk=16)


class Beside:
    """The CPU's backend with some headroom, and with memory of a size that the test says."""

    def __init__(self, headroom: tuple[Headroom, ...], free: int) -> None:
        self._backend: Any = halma.backend("cpu")
        self.headroom, self.free = headroom, free
        self.device = self

    def memory_info(self) -> MemoryInfo:
        return MemoryInfo(self.free, 1 << 40)

    def __getattr__(self, name: str) -> Any:
        for part in (self._backend, self._backend.device):
            if hasattr(part, name):
                return getattr(part, name)
        raise AttributeError(name)


def wanting(layers: int, free: int = 1 << 40) -> Any:
    return Beside((Headroom("long prompts", Guard((("model.layers", layers),)), lambda tokens: tokens * MIB),), free)


def runner(backend: Any, **options: Any) -> V4Runner:
    config, weights = small_model("exact")
    return V4Runner(config, weights, backend, RunnerOptions(max_context=64, chunk=16, **options))


LAYERS = small_model("exact")[0].num_hidden_layers


@pytest.mark.invariant("G20", control=True)
def test_where_there_is_room_steps_are_captured_and_it_is_reported() -> None:
    made = runner(wanting(LAYERS))
    decisions.clear()
    made.prepare([made.decode_descriptor(1, 64, "greedy")])
    assert made.session.report().captured == 1
    ((decision, _),) = decisions.all("memory")
    assert (decision.subject, decision.chosen) == ("long prompts", "kept free")
    assert decision.reason == f"{16 * MIB:,} bytes for steps of 16 tokens"
    made.close()


@pytest.mark.invariant("G20")
def test_every_session_leaves_it_free_beside_the_reserve() -> None:
    made = runner(wanting(LAYERS), reserve=5)
    with scratch(made) as session:
        assert session._stages.budget.reserve == made.session._stages.budget.reserve == 16 * MIB + 5
    made.close()


@pytest.mark.invariant("G20")
def test_a_device_that_does_not_hold_it_is_refused_by_name() -> None:
    for free, fits in ((16 * MIB - 1, False), (16 * MIB, True)):
        backend = wanting(LAYERS, free)
        if fits:
            runner(backend).close()
            continue
        with pytest.raises(ModelError, match="long prompts: 16,777,216 bytes for steps of 16 tokens") as caught:
            runner(backend)
        assert "16,777,215 bytes" in str(caught.value) and "weights and state are there" in str(caught.value)


@pytest.mark.invariant("G20")
def test_it_is_refused_where_the_workspace_took_the_rest() -> None:
    backend = wanting(LAYERS, 16 * MIB)
    made = runner(backend)
    backend.free -= 1
    with pytest.raises(ModelError, match="weights, state, workspace and graphs are there"):
        made.prepare([made.decode_descriptor(1, 64, "greedy")])
    assert made.session.report().captured == 0, "and no graph took any of it"
    made.close()


def test_another_model_keeps_nothing_free_and_says_why() -> None:
    made = runner(wanting(LAYERS + 1, free=0), reserve=5)
    assert made.reserve == 5
    decisions.clear()
    made.prepare([])
    ((decision, _),) = decisions.all("memory")
    assert decision.chosen == "nothing"
    assert decision.reason == f"model.layers is {LAYERS}, it is for {LAYERS + 1}"
    made.close()


@pytest.mark.invariant("G20")
def test_loading_counts_it_beside_weights_and_state(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "tiny-v4"
    layers = halma.models.deepseek_v4.load.resolve_model(name).config.num_hidden_layers
    backend = wanting(layers)
    backend.headroom = (Headroom("long prompts", backend.headroom[0].guard, lambda tokens: tokens << 50),)
    with pytest.raises(ModelError, match="does not fit into memory") as caught:
        load_v4(name, backend, OPTIONS)
    assert f"long prompts {(16 << 50) / 1e9:.2f} GB" in str(caught.value)
