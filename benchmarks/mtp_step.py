"""What a step with MTP costs beside a plain one: verification, the module's own part, tokens a second, the bytes bound.

    python -m benchmarks.mtp_step [--backend cuda] [--models tiny-v4 flash-4] [--batches 1 4 16 64] [--drafts 4]
        [--rounds 7] [--replays 10] [--json] [--output FILE]

Each row is one number of requests. ``plain`` is a decode step of a model without MTP; ``step`` verifies and drafts in
one graph. Its parts are graphs of their own: ``verify`` is the target alone over requests x (drafts + 1) rows, ``push``
what the module adds for those rows, ``draft`` what the chain of drafts adds. Medians over rounds of replays in a row.

The bound is the weights that a step must read, each once, at the bandwidth of a copy measured here: of R rows' experts
the number of distinct ones that uniform routing expects. Contexts are short, so stores are left out.

``flash-4`` are the first four layers of V4-Flash and its MTP module, in shipping formats, made on the device of a seed:
what it drafts is right by chance alone, so its tokens a step say nothing; the step's cost does, and with it how many
tokens a step must bring to be worth it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

import halma
from halma.hal.backend import Backend
from halma.hal.graph.breakable import BreakableGraph
from halma.hal.graph.descriptor import Descriptor
from halma.hal.graph.scope import GraphCaptureScope
from halma.models.deepseek_v4.checkpoint import LoadOptions, load_checkpoint, load_source
from halma.models.deepseek_v4.config import V4Config
from halma.models.deepseek_v4.draft import push_and_draft
from halma.models.deepseek_v4.golden import CaseFile
from halma.models.deepseek_v4.golden_drafts import accepted_runs
from halma.models.deepseek_v4.load import default_arithmetic, default_carrier
from halma.models.deepseek_v4.presets import tiny_directory, v4_flash_shaped
from halma.models.deepseek_v4.runner import RunnerOptions, V4Runner
from halma.models.deepseek_v4.stepper import occupy
from halma.models.deepseek_v4.steps import STEPS, verify
from halma.models.deepseek_v4.synthetic import SyntheticSource
from halma.models.deepseek_v4.weights import LayerWeights, V4Weights, nbytes_of

ROOT = Path(__file__).resolve().parent.parent
CONTEXT, START = 256, 64
"""Tokens that a request may have, and those that it has when a round begins."""
ROUND_SECONDS = 0.3
"""Rounds of slow steps have fewer replays: reference routes take seconds for the experts of 320 rows."""


@dataclass(frozen=True)
class Model:
    """A model on the device; ``case``: prompts with which its acceptance is measured."""

    name: str
    config: V4Config
    weights: V4Weights
    arithmetic: str
    carrier: torch.dtype
    case: CaseFile | None


@dataclass(frozen=True)
class Row:
    """Microseconds of one number of requests; ``bound_*``: of the bytes that must be read, at copy bandwidth."""

    model: str
    requests: int
    drafts: int
    plain: float
    step: float
    verify: float
    push: float
    draft: float
    bound_plain: float
    bound_step: float
    tokens_a_step: float | None

    @property
    def cost(self) -> float:
        """Of a step, in plain ones: the tokens a step from which it pays."""
        return self.step / self.plain

    @property
    def plain_rate(self) -> float:
        """Tokens a second without MTP."""
        return self.requests / self.plain * 1e6

    def rate(self, tokens: float) -> float:
        """Tokens a second with MTP at so many a step."""
        return self.requests * tokens / self.step * 1e6


def load(name: str, backend: Backend, arithmetic: str | None) -> Model:
    """``tiny-v4``, or ``flash-N``: N layers shaped like V4-Flash's."""
    chosen = default_arithmetic(backend, arithmetic)
    device, carrier = backend.device.torch_device, default_carrier(backend, chosen)
    options = LoadOptions(carrier, arithmetic=chosen, device=device, dequantise=device.type == "cpu")
    if name == "tiny-v4":
        loaded = load_checkpoint(tiny_directory(), options)
        case = CaseFile(ROOT / "tests/data/cases/tiny_v4_exact.safetensors")
        return Model(name, loaded.config, loaded.weights, chosen, carrier, case)
    config = v4_flash_shaped(int(name.removeprefix("flash-")))
    loaded = load_source(config, SyntheticSource(config, 0, device), options)
    return Model(name, loaded.config, loaded.weights, chosen, carrier, None)


def runner_for(model: Model, backend: Backend, requests: int, mtp: int, context: int = CONTEXT) -> V4Runner:
    options = RunnerOptions(
        max_requests=requests, max_context=context, chunk=16, batches=(), mtp=mtp, arithmetic=model.arithmetic
    )
    runner = V4Runner(model.config, model.weights, backend, options, carrier=model.carrier)
    shapes = [one for one in runner.descriptors() if one.role != "prefill" or mtp]
    runner.prepare(shapes)
    return runner


# -- time -----------------------------------------------------------------------------------------------

Program = Callable[[V4Runner, Descriptor], object]


def whole(runner: V4Runner, shape: Descriptor) -> object:
    """The step itself."""
    return STEPS[shape.role](runner.model, runner.inputs.views(shape), shape)


def target_alone(runner: V4Runner, shape: Descriptor) -> object:
    """Verification without the module."""
    return verify(runner.model, runner.inputs.views(shape), shape)[:2]


def target_and_push(runner: V4Runner, shape: Descriptor) -> object:
    """Verification, and the module over the rows that were verified; no drafts."""
    inputs = runner.inputs.views(shape)
    choices, emitted, start, streams = verify(runner.model, inputs, shape)
    push_and_draft(runner.model, inputs, shape, streams, start, choices, emitted, 0)
    return choices, emitted


def timed(runner: V4Runner, shape: Descriptor, program: Program, rounds: int, replays: int) -> float:
    """us a replay of ``program`` at ``shape``: median over rounds, each from the same state."""
    graph, device = BreakableGraph(runner.backend, str(shape)), runner.backend.device
    runner.workspace.start()
    with GraphCaptureScope(graph, runner.workspace):
        graph.set_outputs(program(runner, shape))

    def once(count: int) -> float:
        _start(runner, shape)
        device.synchronize()
        begin = time.perf_counter()
        for _ in range(count):
            graph.replay()
        device.synchronize()
        return (time.perf_counter() - begin) / count

    once(1)  # warms up
    count = max(1, min(replays, int(ROUND_SECONDS / once(1))))
    took = [once(count) * 1e6 for _ in range(rounds)]
    graph.reset()
    return statistics.median(took)


def _start(runner: V4Runner, shape: Descriptor) -> None:
    """Every request has START tokens, and drafts that are some tokens."""
    requests, state = shape.num_requests, runner.model.state
    occupy(runner, requests)
    state.lengths[1:] = START
    state.last_token[1:] = torch.arange(requests, device=state.last_token.device) % 100 + 2
    if state.draft is not None:
        state.draft.tokens.fill_(7)
    runner.inputs.fill(range(1, requests + 1), [shape.query_len] * requests)


# -- bytes ----------------------------------------------------------------------------------------------


def bandwidth(backend: Backend) -> float:
    """Bytes a second that a copy reads and writes together."""
    device = backend.device.torch_device
    size = 1 << (30 if device.type != "cpu" else 27)
    source, target = (torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(2))
    best = float("inf")
    for _ in range(8):
        backend.device.synchronize()
        begin = time.perf_counter()
        target.copy_(source)
        backend.device.synchronize()
        best = min(best, time.perf_counter() - begin)
    return 2 * size / best


def layer_bytes(layer: LayerWeights, rows: int, chosen: int) -> float:
    """Bytes of a layer that ``rows`` rows read: all of it, but of the experts the expected number of distinct ones."""
    ffn = layer.ffn
    experts, tables = nbytes_of((ffn.gate_up, ffn.down)), nbytes_of((ffn.tid2eid,))
    share = 1 - (1 - chosen / ffn.gate_up.shape[0]) ** rows
    return nbytes_of(layer) - tables - experts * (1 - share)


def step_bytes(model: Model, requests: int, drafts: int | None) -> float:
    """Bytes of weights that a step reads; ``drafts`` None: a plain one."""
    weights, chosen = model.weights, model.config.num_experts_per_tok
    rows = requests * (1 if drafts is None else drafts + 1)
    total = weights.head.nbytes + sum(layer_bytes(layer, rows, chosen) for layer in weights.layers)
    if drafts is None:
        return total
    module = weights.mtp[0]
    mixing = nbytes_of((module.e_proj, module.h_proj))
    total += mixing + layer_bytes(module.block, rows, chosen)
    if drafts:
        passes = drafts - 1
        total += drafts * weights.head.nbytes + passes * (mixing + layer_bytes(module.block, requests, chosen))
    return total


# -- the table ------------------------------------------------------------------------------------------


def tokens_a_step(model: Model, backend: Backend, drafts: int) -> float | None:
    """Mean over the golden prompts; the same at any number of requests."""
    if model.case is None:
        return None
    runner = runner_for(model, backend, len(model.case.prompts()), drafts, context=512)
    texts = accepted_runs(runner, model.case, drafts)
    runner.close()
    runs = [run for text in texts for run in text.accepted]
    return 1 + sum(runs) / len(runs)


def measure(
    model: Model, backend: Backend, batches: Sequence[int], drafts: int, rounds: int, replays: int
) -> list[Row]:
    speed, mean = bandwidth(backend), tokens_a_step(model, backend, drafts)
    rows: list[Row] = []
    for requests in batches:
        plain_runner = runner_for(model, backend, requests, 0)
        plain = timed(plain_runner, plain_runner.decode_descriptor(requests, CONTEXT, "greedy"), whole, rounds, replays)
        plain_runner.close()
        runner = runner_for(model, backend, requests, drafts)
        shape = runner.verify_descriptor(requests, drafts, CONTEXT, "greedy")
        step, alone, pushed = (
            timed(runner, shape, program, rounds, replays) for program in (whole, target_alone, target_and_push)
        )
        runner.close()
        rows.append(
            Row(
                model.name,
                requests,
                drafts,
                plain,
                step,
                alone,
                pushed - alone,
                step - pushed,
                step_bytes(model, requests, None) / speed * 1e6,
                step_bytes(model, requests, drafts) / speed * 1e6,
                mean,
            )
        )
        print(line(rows[-1]), flush=True)
    return rows


HEAD = (
    f"{'model':<9}{'R':>4}{'plain us':>10}{'step us':>10}{'cost':>7}{'verify':>8}{'push':>7}{'draft':>7}"
    f"{'tok/s':>9}{'MTP':>9}{'a step':>8}{'bound us':>10}{'step':>9}"
)


def line(row: Row) -> str:
    mean = 1.0 if row.tokens_a_step is None else row.tokens_a_step
    shares = "".join(f"{part / row.step:>{w}.0%}" for part, w in ((row.verify, 8), (row.push, 7), (row.draft, 7)))
    return (
        f"{row.model:<9}{row.requests:>4}{row.plain:>10.0f}{row.step:>10.0f}{row.cost:>7.2f}{shares}"
        f"{row.plain_rate:>9.0f}{row.rate(mean):>9.0f}{mean:>8.2f}{row.bound_plain:>10.0f}{row.bound_step:>9.0f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--backend", default="cpu")
    parser.add_argument("--models", nargs="+", default=["tiny-v4"], help="tiny-v4, flash-N")
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 4, 16, 64])
    parser.add_argument("--drafts", type=int, default=4)
    parser.add_argument("--arithmetic", choices=("exact", "shipping"))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--replays", type=int, default=10)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--output", type=Path, help="write the JSON there too")
    given = parser.parse_args()
    if given.replays * (given.drafts + 1) > CONTEXT - START:
        parser.error(f"a round of {given.replays} replays does not fit the context of {CONTEXT} tokens")
    backend = halma.backend(given.backend)
    print(HEAD)
    rows: list[Row] = []
    with torch.no_grad():
        for name in given.models:
            model = load(name, backend, given.arithmetic)
            rows += measure(model, backend, given.batches, given.drafts, given.rounds, given.replays)
            del model
    result = {
        "schema": "halma.benchmark.mtp_step/1",
        "evidence": backend.evidence,
        "torch": torch.__version__,
        "rows": [{**asdict(row), "cost": row.cost} for row in rows],
    }
    if given.output:
        given.output.write_text(json.dumps(result, indent=1), encoding="utf-8")
    if given.json:
        print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
