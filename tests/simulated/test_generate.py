"""``halma generate --backend musa`` on the CPU simulator: the tokens of the cpu backend, and marked as simulated."""

from __future__ import annotations

import json

import pytest

from tests.cpu.cli.launching import forked
from tests.simulated.children import generated, run

PROMPT = ("--prompt", "The President", "--arithmetic", "exact")


@pytest.mark.parametrize(
    "more",
    [
        pytest.param(("--max-tokens", "24"), id="plain"),
        pytest.param(("--max-tokens", "24", "--mtp", "4"), id="mtp"),
        pytest.param(("--max-tokens", "24", "--no-graph"), id="eager"),
        pytest.param(("--max-tokens", "24", "--batch", "3"), id="batch"),
    ],
)
@pytest.mark.nightly
@pytest.mark.invariant("B10", control=True)
def test_the_tokens_are_the_cpus(more: tuple[str, ...]) -> None:
    here = generated([*PROMPT, *more, "--backend", "cpu"], None)
    simulated = generated([*PROMPT, *more, "--backend", "musa"], "cpu")
    tokens = [one["token_ids"] for one in here["generations"]]
    assert tokens and all(tokens)
    assert [one["token_ids"] for one in simulated["generations"]] == tokens
    assert (here["evidence"], simulated["evidence"]) == ("cpu", "simulated")
    captures = "--no-graph" not in more
    assert (simulated["graphs"]["replayed_steps"] > 0) is captures
    assert simulated["graphs"]["replayed_steps"] == here["graphs"]["replayed_steps"]


@pytest.mark.invariant("B10")
def test_text_alone_is_marked_beside_it() -> None:
    """Piped output has no table; the mark goes to standard error, and the text stays as it is."""
    done = run("-m", "halma", "generate", *PROMPT, "--max-tokens", "1", "--backend", "musa")
    assert done.returncode == 0, done.stderr
    assert "halma: note: musa is simulated" in done.stderr and "simulated" not in done.stdout


@pytest.mark.parametrize(
    ("backend", "notes"),
    [
        pytest.param("musa", [1, 0], marks=pytest.mark.invariant("B10")),
        pytest.param("cpu", [0, 0], marks=pytest.mark.invariant("B10", control=True)),
    ],
)
def test_ranks_of_roles_mark_it_once(backend: str, notes: list[int]) -> None:
    """The mark comes before anything is loaded, so ranks that find no model show it in less time."""
    roles = ("--attention-ranks", "1", "--ffn-ranks", "1", "--model", "no-such-model", "--prompt-ids", "1,2")
    found = forked("ffn", [("--backend", backend, *roles)] * 2, HALMA_MUSA_SIM="cpu")
    assert [(code, out) for code, out, _ in found] == [(2, "")] * 2
    assert [err.count("is simulated: no such device was used") for _, _, err in found] == notes
    assert "no-such-model" in found[0][2]


@pytest.mark.invariant("B10")
def test_an_explanation_is_marked_too() -> None:
    done = run("-m", "halma", "explain", "--op", "swiglu", "--backend", "musa")
    assert done.returncode == 0 and "halma: note: musa is simulated" in done.stderr, done.stderr
    assert "runs no kernels of the portable dialect" in done.stdout
    for more in ((), ("--op", "swiglu")):
        done = run("-m", "halma", "explain", *more, "--backend", "musa", "--json")
        assert json.loads(done.stdout)["evidence"] == "simulated", done.stderr


@pytest.mark.nightly  # 11 s
def test_a_models_explanation_names_the_guarded_ops_and_what_is_kept_free() -> None:
    done = run("-m", "halma", "explain", "--model", "tiny-v4", "--backend", "musa", "--json")
    assert done.returncode == 0, done.stderr
    made = json.loads(done.stdout)["decisions"]
    (kept,) = [one for one in made if one["kind"] == "memory"]
    assert (kept["subject"], kept["chosen"]) == ("sparse prefill", "nothing")
    assert kept["candidates"][1]["reason"] == "model.hidden_size is 256, it is for 4096"
    for op in ("swiglu_fp8", "linear_fp8"):  # the shared expert's
        found = [one for one in made if one["subject"] == op]
        assert found and all(one["candidates"][0]["name"] == "simt" for one in found)
        assert {one["chosen"] for one in found} == {"reference"}


@pytest.mark.invariant("B10")
def test_auto_does_not_take_it() -> None:
    done = run("-m", "halma", "generate", *PROMPT, "--max-tokens", "1", "--backend", "auto")
    assert done.returncode != 0
    assert "simulated: has to be named" in done.stdout + done.stderr


@pytest.mark.invariant("B10", control=True)
def test_by_its_name_it_can_be_had() -> None:
    done = run("-c", "from halma.hal.registry import default_registry as r; print(r().choose('musa')[0].usable)")
    assert done.stdout.strip() == "True", done.stderr
