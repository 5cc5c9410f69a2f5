"""The simulator over torch.cuda on a real GPU: the backend's own code paths run there, and the misbehaviours bite.

Nothing here is behaviour of Moore Threads' hardware: it is ours, over a stand-in.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from tests.simulated.children import findings, generated, run

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="the simulator over torch.cuda needs an NVIDIA GPU"
)
PROMPT = ("--prompt", "The President", "--max-tokens", "24")


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    return findings("tests.simulated.graph_program", mode="cuda")


def test_captures_replay_and_are_refused(found: dict[str, Any]) -> None:
    assert found["replays"] == [0.0, 2.0, 5.0]
    assert "the default stream cannot be captured" in found["default stream"]
    assert found["joined"] == ""
    for name in ("host read", "host wait", "pageable copy", "unjoined", "event from outside"):
        assert found[name], name
    assert found["usable afterwards"] == ""
    assert "The MUSA Graph is empty" in found["empty"]


def test_reset_does_not_give_the_pool_back(found: dict[str, Any]) -> None:
    kept, released = found["kept"], found["released"]
    assert all(later > earlier for earlier, later in itertools.pairwise(kept)), kept
    assert len(set(released)) == 1, released


def test_the_executable_after_the_last_one_fails(found: dict[str, Any]) -> None:
    filled, error = found["ceiling"]
    assert filled
    assert "illegal memory access" in error
    assert found["one less"] == ""


@pytest.mark.parametrize("more", [(), ("--mtp", "4"), ("--no-graph",)], ids=["plain", "mtp", "eager"])
def test_the_tokens_are_those_of_the_cuda_backend(more: tuple[str, ...]) -> None:
    on_cuda = generated([*PROMPT, *more, "--backend", "cuda"], None)
    simulated = generated([*PROMPT, *more, "--backend", "musa"], "cuda")
    assert simulated["generations"][0]["token_ids"] == on_cuda["generations"][0]["token_ids"]
    assert simulated["evidence"] == "simulated"
    assert (simulated["graphs"]["replayed_steps"] > 0) is ("--no-graph" not in more)


def test_torch_cudas_event_is_caught() -> None:
    done = run(
        "-c",
        "import torch\nfrom halma.backends.musa.seam import torch_musa\nmusa = torch_musa()\n"
        "musa.Stream().wait_event(musa.Stream().record_event())\ntorch.cuda.Event()",
        mode="cuda",
    )
    assert done.returncode != 0
    assert "torch.cuda.Event was called by __main__" in done.stderr
