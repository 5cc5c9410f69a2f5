"""Decode of the tiny checkpoint on a CPU: graph replay, eager, and transformers, in one run.

    python -m benchmarks.cpu_decode [--json] [--rounds N] [--threads N]

All three hold the same weights in exact arithmetic and decode the prompt ``mid`` of the golden cases at
batch 1, step by step over the steps 8 to 88 of its greedy text. Each decodes on its own cache, and the three
take turns step by step, so that noise of the machine falls on all alike; medians over all steps and rounds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file

import halma
from benchmarks.peers import transformers_checkpoint
from halma.models.deepseek_v4.engine import Engine, Request
from halma.models.deepseek_v4.load import load_v4, resolve_model
from halma.models.deepseek_v4.runner import RunnerOptions

ROOT = Path(__file__).resolve().parent.parent
FIRST_STEP, LAST_STEP = 8, 88


class HalmaDecoder:
    """One request in an engine, stepped by hand."""

    def __init__(self, prompt: list[int], *, graph: bool) -> None:
        options = RunnerOptions(max_context=512, graph=graph)
        self.loaded = load_v4("tiny-v4", halma.backend("cpu"), options)
        self.engine = Engine(self.loaded.runner)
        self.generation = self.engine.submit(Request(tuple(prompt), max_tokens=128))
        self.engine.step()

    def step(self) -> None:
        self.engine.step()

    def tokens(self) -> list[int]:
        return self.generation.tokens


class TransformersDecoder:
    """transformers' own model with the same dequantised weights and its own cache."""

    def __init__(self, prompt: list[int]) -> None:
        from transformers import DynamicCache

        self.model = transformers_checkpoint(resolve_model("tiny-v4").path)
        self.cache = DynamicCache(config=self.model.config)
        self.found: list[int] = []
        self.next = torch.tensor([prompt])
        self.step()

    def step(self) -> None:
        with torch.no_grad():
            out = self.model(input_ids=self.next, past_key_values=self.cache, use_cache=True)
        self.next = out.logits[:, -1:].argmax(-1)
        self.found.append(int(self.next))

    def tokens(self) -> list[int]:
        return self.found


def timed(run: Callable[[], None]) -> float:
    begin = time.perf_counter()
    run()
    return (time.perf_counter() - begin) * 1e3


def measure(rounds: int) -> dict[str, list[float]]:
    case = load_file(ROOT / "tests/data/cases/tiny_v4_exact.safetensors")
    prompt: list[int] = case["mid.prompt_ids"].tolist()
    expected: list[int] = case["mid.tokens"].tolist()
    times: dict[str, list[float]] = {"graph": [], "eager": [], "transformers": []}
    for _ in range(rounds):
        decoders = {
            "graph": HalmaDecoder(prompt, graph=True),
            "eager": HalmaDecoder(prompt, graph=False),
            "transformers": TransformersDecoder(prompt),
        }
        for step in range(1, LAST_STEP):
            for name, decoder in decoders.items():
                spent = timed(decoder.step)
                if step >= FIRST_STEP:
                    times[name].append(spent)
        for name, decoder in decoders.items():
            found = decoder.tokens()
            if found[:LAST_STEP] != expected[: len(found[:LAST_STEP])] or len(found) < LAST_STEP - 2:
                raise SystemExit(f"{name} decoded other tokens than the golden case: timing it would mean nothing")
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3, help="fresh decoders and 80 timed steps each")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    medians = {name: statistics.median(spent) for name, spent in measure(arguments.rounds).items()}
    result = {
        "schema": "halma.benchmark.cpu_decode/1",
        "evidence": "cpu",
        "torch": torch.__version__,
        "threads": arguments.threads,
        "steps": (LAST_STEP - FIRST_STEP) * arguments.rounds,
        "milliseconds_per_step": medians,
        "graph_over_eager": medians["eager"] / medians["graph"],
        "graph_over_transformers": medians["transformers"] / medians["graph"],
    }
    if arguments.json:
        print(json.dumps(result, indent=2))
        return
    for name, value in medians.items():
        print(f"{name:<14}{value:8.3f} ms a step")
    print(f"graph is {result['graph_over_eager']:.2f}x eager and {result['graph_over_transformers']:.2f}x transformers")


if __name__ == "__main__":
    main()
