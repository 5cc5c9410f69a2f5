"""``halma generate`` and ``halma verify`` as a person runs them: text, JSON, and every way to ask wrongly."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from halma.cli.main import run
from halma.hal.testing.forks import Ended, Fork

DATA = Path(__file__).parents[3] / "src" / "halma" / "data" / "tiny-v4"
CASES = Path(__file__).parents[2] / "data" / "cases"


def surroundings(**more: str) -> dict[str, str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("HALMA_")}
    return {**clean, "OMP_NUM_THREADS": "1", **more}


def halma(*arguments: str, stdin: bytes = b"", **more: str) -> Ended:
    return Fork(run, arguments, environment=surroundings(**more), stdin=stdin).end()


def refused(done: Ended, *words: str) -> None:
    assert done.code == 2, (done.code, done.err)
    assert done.err.startswith("halma: ") and "Traceback" not in done.err and not done.out
    for word in words:
        assert word in done.err, done.err


def generate(*arguments: str, **kwargs) -> Ended:
    return halma("generate", "--backend", "cpu", *arguments, **kwargs)


def test_json_is_a_contract():
    """In a Python of its own, as a person starts it."""
    command = [sys.executable, "-m", "halma", "generate", "--backend", "cpu", "--prompt", "The President"]
    command += ["--max-tokens", "12", "--json"]
    run = subprocess.run(command, capture_output=True, env=surroundings(), timeout=240, check=False)
    assert run.returncode == 0, run.stderr.decode()
    found = json.loads(run.stdout)
    assert found["schema"] == "halma.generate/1" and found["backend"] == "cpu" and found["evidence"] == "cpu"
    assert found["text"].startswith("'s Senate and House of") and len(found["token_ids"]) == 12
    assert found["tokens_per_second"] > 0 and found["arithmetic"] == "exact" and found["finish"] == "length"
    assert found["graphs"]["captured"] > 0 and found["graphs"]["replayed_steps"] == 11
    assert all("prefill" in why for why in found["graphs"]["why_eager"])


def test_text_streams_and_ends_with_the_table():
    done = generate("--max-tokens", "10", "--table", stdin=b"The President")
    text = done.out
    assert done.code == 0 and text.startswith("The President's Senate and House")
    for word in ("backend", "tokens/s", "captured", "memory", "evidence", "exact"):
        assert word in text


def test_a_batch_of_samples_differs_and_repeats():
    arguments = ("--prompt", "The", "--batch", "3", "--temperature", "1", "--max-tokens", "8", "--json")
    first, second = generate(*arguments), generate(*arguments)
    texts = [entry["token_ids"] for entry in json.loads(first.out)["generations"]]
    assert len(texts) == 3 and len({tuple(t) for t in texts}) > 1
    assert [e["token_ids"] for e in json.loads(second.out)["generations"]] == texts


def test_switched_off_capture_says_why_it_is_eager():
    found = json.loads(generate("--prompt", "The", "--max-tokens", "4", "--json", HALMA_GRAPH="0").out)
    assert found["graphs"]["captured"] == 0 and found["graphs"]["replayed_steps"] == 0
    assert list(found["graphs"]["why_eager"]) == ["capture is switched off"]


@pytest.mark.parametrize(
    ("arguments", "stdin", "words"),
    [
        (("--model", "tiny-v5"), b"x", ('no model called "tiny-v5"', "did you mean", "tiny-v4")),
        (("--model", "/nonexistent"), b"x", ("no model called", "/nonexistent")),
        (("--model", "V4-Flash"), b"x", ("known as a configuration", "download")),
        ((), b"", ("the prompt is empty",)),
        (("--prompt", "  "), b"", ("the prompt is empty",)),
        ((), b"caf\xe9 noir", ("not valid UTF-8", "0xe9", "offset 3")),
        (("--prompt-ids", "0,x"), b"", ("must be integers",)),
        (("--prompt-ids", "0,5000"), b"", ("does not know", "1024")),
        (("--prompt", "a", "--prompt-ids", "1"), b"", ("given twice",)),
        (("--prompt", "a", "--max-tokens", "0"), b"", ("nothing to generate",)),
        (("--prompt", "a", "--max-tokens", "5000"), b"", ("longer than the context", "4096")),
        (("--prompt", "a", "--batch", "0"), b"", ("at least one request",)),
        (("--prompt", "a", "--temperature", "-1"), b"", ("out of range",)),
        (("--prompt", "a", "--arithmetic", "fast"), b"", ("no arithmetic", "exact", "shipping")),
        (("--prompt", "a", "--context", "2"), b"", ("longer than the context",)),
        (("--file", "/nonexistent"), b"", ("cannot be read",)),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else None,
)
def test_wrong_input_is_refused_with_exit_2(arguments, stdin, words):
    refused(generate(*arguments, stdin=stdin), *words)


def test_an_unknown_backend_is_refused_with_every_reason():
    done = halma("generate", "--prompt", "a", "--backend", "cpi")
    refused(done, 'no backend called "cpi"', 'did you mean "cpu"', "usable")


def broken(tmp_path: Path) -> Path:
    shutil.copytree(DATA, tmp_path / "model")
    return tmp_path / "model"


def test_a_directory_without_weights_is_refused(tmp_path):
    model = broken(tmp_path)
    (model / "model.safetensors").unlink()
    refused(generate("--model", str(model), "--prompt", "a"), "weights", str(model))


def test_truncated_weights_are_refused(tmp_path):
    file = broken(tmp_path) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:1_000_000])
    refused(generate("--model", str(file.parent), "--prompt", "a"), "model.safetensors")


def test_another_architecture_is_refused(tmp_path):
    model = broken(tmp_path)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "model_type": "deepseek_v41"}))
    refused(generate("--model", str(model), "--prompt", "a"), "deepseek_v41")


def test_verify_passes_a_case_and_says_so():
    done = halma("verify", str(CASES / "hash_only.safetensors"), "--backend", "cpu", "--json")
    found = json.loads(done.out)
    assert done.code == 0 and found["passed"] and found["cases"][0]["case"] == "hash_only"


def test_verify_refuses_a_file_that_is_no_case(tmp_path):
    refused(halma("verify", str(DATA / "model.safetensors"), "--backend", "cpu"), "not a golden case")
