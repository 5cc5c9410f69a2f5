"""``halma generate --mtp`` and ``halma bench decode`` as a person runs them, and every way to ask wrongly."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from tests.cpu.cli.conftest import Halma
from tests.cpu.cli.test_generate import DATA

PROMPT = ("--backend", "cpu", "--prompt", "The President")


def generated(halma: Halma, *arguments: str) -> dict[str, Any]:
    done = halma("generate", *PROMPT, "--json", *arguments)
    assert done.code == 0, done.err
    return json.loads(done.out)


def refused(halma: Halma, arguments: tuple[str, ...], *words: str) -> None:
    done = halma(*arguments)
    assert done.code == 2 and not done.out, (done.code, done.out)
    for word in words:
        assert word in done.err, done.err


@pytest.mark.invariant("M1")
def test_json_has_the_tokens_of_a_run_without_mtp_and_what_became_of_the_drafts(halma: Halma):
    plain = generated(halma, "--max-tokens", "24")
    found = generated(halma, "--max-tokens", "24", "--mtp", "4", "--ahead", "2")
    assert found["token_ids"] == plain["token_ids"] and found["text"] == plain["text"] and "mtp" not in plain
    report = found["mtp"]
    assert report["asked"] == 4 and report["lengths"] == [4] and report["choices"] == []
    assert len(report["acceptance"]) == 4 and report["acceptance"] == sorted(report["acceptance"], reverse=True)
    assert [a / j for a, j in zip(report["accepted"], report["judged"], strict=True)] == report["acceptance"]
    assert report["tokens_per_step"] == 23 / report["verified"] > 2 and report["mean_accepted_length"] > 2
    share = report["time_share"]
    assert share["verify"] + share["draft"] == pytest.approx(1) and share["verify_ms"] > 0
    assert "the target's part alone" in share["reason"]
    assert found["graphs"]["replayed_steps"] < plain["graphs"]["replayed_steps"] == 23


@pytest.mark.nightly  # tests/cpu/model/test_mtp_sampling.py shows it of the engine in a third of the time
@pytest.mark.invariant("M10")
def test_drawn_text_is_the_same_with_drafts_of_any_number(halma: Halma):
    drawn = ("--max-tokens", "16", "--temperature", "0.9", "--top-p", "0.95", "--seed", "3", "--batch", "2")
    plain = generated(halma, *drawn)
    found = generated(halma, *drawn, "--mtp", "auto")
    assert [one["token_ids"] for one in found["generations"]] == [one["token_ids"] for one in plain["generations"]]
    report = found["mtp"]
    assert report["asked"] == "auto" and report["lengths"] == [1, 2, 4, 8] and report["choices"]
    costs = {(cost["requests"], cost["drafts"]): cost["milliseconds"] for cost in report["step_costs"]}
    assert set(costs) == {(size, drafts) for size in (1, 2) for drafts in (1, 2, 4, 8)} and min(costs.values()) > 0
    assert set(report["choices"][0]["tokens_per_second"]) == {"1", "2", "4", "8"}


def test_the_table_tells_it_to_a_person(halma: Halma):
    done = halma("generate", *PROMPT, "--max-tokens", "12", "--mtp", "4", "--table")
    assert done.code == 0 and done.out.startswith("The President's Senate")
    for word in ("acceptance", "by position", "accepted length", "tokens/step", "verify", "#178", "3.18 to 3.36"):
        assert word in done.out


def test_a_stop_text_ends_the_text_behind_it(halma: Halma):
    found = generated(halma, "--max-tokens", "24", "--mtp", "4", "--ahead", "4", "--stop", "House of")
    assert found["text"] == "'s Senate and House of" and found["finish"] == "stop"


@pytest.mark.parametrize("mtp", [(), ("--mtp", "2")])
def test_top_p_at_temperature_0_is_said_to_have_no_effect(halma: Halma, mtp):
    arguments = ("generate", *PROMPT, "--max-tokens", "6", "--json", *mtp)
    done, plain = halma(*arguments, "--top-p", "0.5"), halma(*arguments)
    assert done.code == plain.code == 0 and json.loads(done.out)["token_ids"] == json.loads(plain.out)["token_ids"]
    assert "--top-p has no effect at temperature 0" in done.err and "top-p" not in plain.err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--mtp", "0"), ("1 to 8", "--mtp 0", "leave it out")),
        (("--mtp", "9"), ("1 to 8", "--mtp 9")),
        (("--mtp", "-1"), ("1 to 8",)),
        (("--mtp", "many"), ("1 to 8", "auto")),
        (("--mtp", "4", "--max-tokens", "3"), ("more drafts than the context has left", "3 left", "--mtp 3 or fewer")),
        (("--mtp", "8", "--context", "12"), ("12 tokens of context, 6 of them prompt: 6 left",)),
        (("--mtp", "2", "--ahead", "5"), ("so far ahead", "ahead=1 to 4")),
        (("--stop", ""), ("stop text", "an empty text")),
    ],
    ids=" ".join,
)
def test_what_cannot_be_drafted_is_refused(halma: Halma, arguments, words):
    refused(halma, ("generate", *PROMPT, *arguments), *words)


# -- models without a module: the target alone still runs -----------------------------------------------


@pytest.fixture
def without(tmp_path: Path) -> Path:
    shutil.copytree(DATA, tmp_path / "model")
    return tmp_path / "model"


def configured(model: Path, **changes: Any) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, **changes}))


def stripped(model: Path, *, dspark: bool) -> None:
    """Tensors without the MTP module, or with its input norms alone gone, as a drafter of another kind has it."""
    file = model / "model.safetensors"
    tensors = load_file(file)
    gone = ("mtp.0.enorm", "mtp.0.hnorm") if dspark else ("mtp.",)
    save_file({name: one for name, one in tensors.items() if not name.startswith(gone)}, file)


@pytest.mark.parametrize(
    ("dspark", "found", "note"),
    [(False, "no MTP module", "the checkpoint holds none"), (True, "DSpark", "DSpark drafter, not MTP")],
)
def test_a_checkpoint_without_mtp_says_so_and_its_target_runs(halma: Halma, without: Path, dspark, found, note):
    stripped(without, dspark=dspark)
    arguments = ("generate", "--model", str(without), *PROMPT, "--max-tokens", "6")
    refused(halma, (*arguments, "--mtp", "2"), "MTP is not available", found, "generate without MTP")
    alone = halma(*arguments)
    assert alone.code == 0 and alone.out.startswith("The President") and note in alone.err


def test_a_configuration_without_mtp_is_refused_before_anything_is_loaded(halma: Halma, without: Path):
    config = json.loads((without / "config.json").read_text())
    configured(without, num_nextn_predict_layers=0, compress_ratios=config["compress_ratios"][:-1])
    (without / "model.safetensors").unlink()
    refused(halma, ("generate", "--model", str(without), *PROMPT, "--mtp", "2"), "no MTP module", "without MTP")


# -- halma bench ----------------------------------------------------------------------------------------


def test_bench_measures_steps_with_mtp_beside_steps_without(halma: Halma):
    done = halma("bench", "decode", "--backend", "cpu", "--mtp", "2", "--batch", "1,2", "--steps", "3", "--json")
    assert done.code == 0, done.err
    found = json.loads(done.out)
    assert found["schema"] == "halma.bench/1" and found["evidence"] == "cpu" and found["steps"] == 3
    rows = found["rows"]
    assert [(row["requests"], row["mtp"]) for row in rows] == [(1, None), (1, 2), (2, None), (2, 2)]
    for row in rows:
        assert row["milliseconds_per_step"] > 0 and row["replayed_steps"] == 3 and row["host_waits"] == 0
        least = 3 * row["requests"]
        assert row["tokens"] == least if row["mtp"] is None else least <= row["tokens"] <= 3 * least
        assert row["tokens_per_second"] == pytest.approx(row["tokens"] / row["milliseconds_per_step"] / 3 * 1e3)
    assert rows[1]["speedup"] == pytest.approx(rows[1]["tokens_per_second"] / rows[0]["tokens_per_second"])
    assert len(rows[3]["drafting"]["acceptance"]) == 2 and rows[3]["time_share"]["draft"] is not None
    assert "speedup" not in rows[2] and rows[2]["time_share"] is None


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("encode",), ("no benchmark called 'encode'", "halma bench decode")),
        (("decode", "--batch", "0"), ("--batch takes numbers", "1,4,16,64")),
        (("decode", "--batch", "two"), ("--batch takes numbers",)),
        (("decode", "--steps", "0"), ("--steps",)),
        (("decode", "--mtp", "9"), ("1 to 8",)),
        (("decode", "--context", "40"), ("do not fit into the context", "--context")),
    ],
    ids=" ".join,
)
def test_what_cannot_be_measured_is_refused(halma: Halma, arguments, words):
    refused(halma, ("bench", arguments[0], "--backend", "cpu", *arguments[1:]), *words)


def test_explain_shows_how_many_drafts_are_chosen_and_what_each_number_promised(halma: Halma):
    done = halma("explain", "--model", "tiny-v4", "--backend", "cpu", "--mtp", "auto", "--json")
    assert done.code == 0, done.err
    first = json.loads(done.out)["decisions"][0]
    assert first["kind"] == "drafts" and first["subject"] == "1 requests" and first["asked"] == "drafts=auto"
    assert [one["name"] for one in first["candidates"]] == ["1 drafts", "2 drafts", "4 drafts", "8 drafts"]
    assert sum(one["chosen"] for one in first["candidates"]) == 1
    assert all("tokens expected in" in one["reason"] for one in first["candidates"])


def test_explain_with_mtp_and_no_model_is_refused(halma: Halma):
    refused(halma, ("explain", "--mtp", "auto"), "--mtp is about a model's steps", "--model NAME")
