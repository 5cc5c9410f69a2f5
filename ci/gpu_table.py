"""Everything that an accelerator must show, part by part, and one table of it.

    python -m ci.gpu_table [--backend cuda] [--only capture,verify] [--jobs 3] [--deadline 540] [--output FILE]

Works where halma is installed and where it is only on the path (``PYTHONPATH=src:. python3 -m ci.gpu_table``). Parts
that share a device without harm run side by side first, spread over the devices; then those that want a device of their
own, one a device; then those that want all of them, one at a time. A part has a time limit of its own, and one that
cannot run here is named with its reason. The file is written anew after each part, so that what was found outlives an
interrupted run. Ends with status 1 if a part failed or did not end.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from queue import SimpleQueue

from ci.gpu_parts import Machine, Part, Result, Share, parts
from ci.schema import ROOT

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pyright: ignore[reportMissingImports]

LOGS = ROOT / ".halma" / "gpu"
LAST_WORDS_SECONDS = 10.0
GROUPS = ("halma.backends", "halma.routes", "pytest11")

MACHINE = """
import importlib.metadata, json, pathlib, platform, shutil, subprocess
import torch

def version(name):
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""

def driver():
    tool = shutil.which("nvidia-smi") or shutil.which("mthreads-gmi")
    if tool is not None and "nvidia" in tool:
        asked = [tool, "--query-gpu=driver_version", "--format=csv,noheader"]
        done = subprocess.run(asked, capture_output=True, text=True, timeout=30)
        if done.returncode == 0 and done.stdout.strip():
            return done.stdout.split()[0]
    file = pathlib.Path("/proc/driver/nvidia/version")
    return file.read_text().splitlines()[0] if file.exists() else "unknown"

devices = torch.accelerator.device_count() if torch.accelerator.is_available() else 0
module = torch.get_device_module()
names = ("torch", "triton", "cuda-core", "cuda-bindings", "nvidia-cuda-nvrtc", "nvidia-nccl-cu13", "transformers")
versions = {name: version(name) for name in names}
print(json.dumps({
    "devices": [module.get_device_name(at) for at in range(devices)],
    "driver": driver(), "python": platform.python_version(),
    "versions": {**{name: found for name, found in versions.items() if found}, "torch": torch.__version__},
}))
"""


def discoverable(folder: Path, environment: Mapping[str, str]) -> dict[str, str]:
    """``environment`` in which halma's entry points are found: as they are, or through metadata put into ``folder``."""
    if all(any("halma." in entry.value for entry in importlib.metadata.entry_points(group=group)) for group in GROUPS):
        return dict(environment)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    version = project.get("version", "0")
    info = folder / f"halma-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: halma\nVersion: {version}\n", encoding="utf-8")
    lines: list[str] = []
    for group, entries in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{name} = {value}" for name, value in entries.items())]
    (info / "entry_points.txt").write_text("\n".join([*lines, ""]), encoding="utf-8")
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT), str(folder), environment.get("PYTHONPATH", "")])
    return {**environment, "PYTHONPATH": path.rstrip(os.pathsep)}


def machine(backend: str, environment: Mapping[str, str]) -> Machine:
    """What there is to run on.

    Raises:
        SystemExit: torch does not import, so nothing can be run.
    """
    done = subprocess.run(
        [sys.executable, "-c", MACHINE], env=dict(environment), capture_output=True, text=True, timeout=120, check=False
    )
    if done.returncode:
        raise SystemExit(f"gpu_table: torch cannot be asked for devices:\n{done.stderr.strip()}")
    sanitizer = Path(os.environ.get("COMPUTE_SANITIZER", "/usr/local/cuda/bin/compute-sanitizer"))
    workers = importlib.util.find_spec("xdist") is not None
    return Machine(backend, **json.loads(done.stdout), sanitizer=sanitizer.exists(), workers=workers)


@dataclass
class Run:
    """Parts by ``names``, how they went, and where it is written."""

    names: Sequence[str]
    here: Machine
    environment: Mapping[str, str]
    logs: Path
    output: Path
    commit: str
    end: float

    def __post_init__(self) -> None:
        self.results: dict[str, Result] = {}
        self._lock = threading.Lock()
        self._began = time.strftime("%Y-%m-%d")

    def all(self, chosen: Sequence[Part], jobs: int) -> None:
        """Run ``chosen``, of those that may share a device ``jobs`` at a time."""
        devices = max(len(self.here.devices), 1)
        for share, at_once in ((Share.SHARED, jobs), (Share.DEVICE, devices)):
            free: SimpleQueue[int] = SimpleQueue()
            for number in range(at_once):
                free.put(number % devices)

            def on_one(part: Part, free: SimpleQueue[int] = free) -> None:
                device = free.get()
                try:
                    self.part(part, device)
                finally:
                    free.put(device)

            with ThreadPoolExecutor(at_once) as pool:
                list(pool.map(on_one, [part for part in chosen if part.share is share]))
        for part in chosen:
            if part.share is Share.MACHINE:
                self.part(part)

    def part(self, part: Part, device: int | None = None) -> None:
        """Run one part, on all devices or the one numbered ``device``, and note its result."""
        left = self.end - time.monotonic()
        if part.missing:
            result = Result(0, 0, 0, 0.0, f"not run: {part.missing}", ran=False)
        elif left < 1:
            result = Result(0, 0, 0, 0.0, "not run: the deadline had passed", ran=False)
        else:
            print(f"gpu_table: {part.name} begins", flush=True)
            result = self._run(part, min(part.seconds, left), self._environment(device))
            print(f"gpu_table: {part.name}: {result.line()}", flush=True)
        with self._lock:
            self.results[part.name] = result
            self.output.parent.mkdir(parents=True, exist_ok=True)
            self.output.write_text(self.page(), encoding="utf-8")

    def _environment(self, device: int | None) -> Mapping[str, str]:
        """Of a part that sees ``device`` alone, counted among those that this process sees."""
        if device is None or len(self.here.devices) < 2:
            return self.environment
        name = f"{self.here.backend.upper()}_VISIBLE_DEVICES"
        seen = [entry for entry in self.environment.get(name, "").split(",") if entry]
        return {**self.environment, name: seen[device] if seen else str(device)}

    def _run(self, part: Part, seconds: float, environment: Mapping[str, str]) -> Result:
        begin, text = time.monotonic(), list[str]()
        report = self.logs / f"{part.name}.json"
        report.unlink(missing_ok=True)
        found = Result(0, 0, 0, 0.0, "")
        for command in part.commands(report):
            status, said = _finished(command, environment, seconds - (time.monotonic() - begin))
            text.append(f"$ {' '.join(command)}\n{said}\nstatus {status}\n")
            if status is None:
                found += Result(0, 1, 0, 0.0, f"did not end within {seconds:.0f} s")
                break
            found += part.read(said, status, report)
        (self.logs / f"{part.name}.txt").write_text("\n".join(text), encoding="utf-8")
        return replace(found, seconds=time.monotonic() - begin)

    def page(self) -> str:
        """Markdown: where it ran, and the table."""
        names = ", ".join(f"{self.here.devices.count(one)} x {one}" for one in dict.fromkeys(self.here.devices))
        versions = ", ".join(f"{name} {version}" for name, version in self.here.versions.items())
        head = [
            f"# What ran on {names or 'no device'}",
            "",
            f"{self._began}, backend {self.here.backend}, commit {self.commit}. Driver {self.here.driver}, "
            f"Python {self.here.python}, {versions}.",
            "",
            "| suite | passed | failed | skipped | seconds | |",
            "|---|---|---|---|---|---|",
        ]
        rows = [
            f"| {name} | {one.passed} | {one.failed} | {one.skipped} | {one.seconds:.0f} | {one.note} |"
            for name in self.names
            if (one := self.results.get(name)) is not None
        ]
        return "\n".join([*head, *rows, ""])


def _finished(command: Sequence[str], environment: Mapping[str, str], seconds: float) -> tuple[int | None, str]:
    """Exit status (None: it was ended at its limit, with everything that it started) and what it said."""
    with tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen(
            command, cwd=ROOT, env=dict(environment), stdin=subprocess.DEVNULL, stdout=said, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
        status: int | None = None
        with contextlib.suppress(subprocess.TimeoutExpired):
            status = process.wait(max(seconds, 0.1))
        if status is None:
            _end(process)
        said.seek(0)
        return status, said.read()


def _end(process: subprocess.Popen[bytes]) -> None:
    """Interrupt it first: pytest then still says what had failed; end whatever is left of its group."""
    process.send_signal(signal.SIGINT)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(LAST_WORDS_SECONDS)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _commit() -> str:
    asked = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=10", "--exclude=*"]
    with contextlib.suppress(OSError):
        done = subprocess.run(asked, capture_output=True, text=True, check=False)
        return done.stdout.strip() or "unknown"
    return "unknown"


def show(results: Mapping[str, Result]) -> None:
    """The one table."""
    width = max(map(len, results), default=5)
    print(f"\n{'suite':{width}s} passed failed skipped seconds")
    for name, one in results.items():
        print(f"{name:{width}s} {one.passed:6d} {one.failed:6d} {one.skipped:7d} {one.seconds:7.0f} {one.note}")


def main(given: Sequence[str] | None = None) -> int:
    """See the module."""
    parser = argparse.ArgumentParser(prog="python -m ci.gpu_table")
    parser.add_argument("--backend", default="cuda")
    parser.add_argument("--only", default="", help="parts, separated by commas")
    parser.add_argument("--jobs", type=int, default=1, help="parts at once, of those that may run side by side")
    parser.add_argument("--deadline", type=float, default=float("inf"), help="seconds for all; no part begins later")
    parser.add_argument("--output", type=Path, default=LOGS / "table.md")
    parser.add_argument("--logs", type=Path, default=LOGS)
    parser.add_argument("--commit", default=None, help="what runs, where there is no git to ask")
    parser.add_argument("--list", action="store_true", help="name the parts and end")
    options = parser.parse_args(given)
    clean = {name: value for name, value in os.environ.items() if not name.startswith("HALMA_")}
    clean["PYTHON"] = sys.executable  # of the scripts
    with tempfile.TemporaryDirectory() as scratch:
        environment = discoverable(Path(scratch), clean)
        here = machine(options.backend, environment)
        known = parts(here)
        wanted = [name for name in options.only.split(",") if name] or list(known)
        unknown = [name for name in wanted if name not in known]
        if unknown or options.jobs < 1:
            what = f"no part is called {', '.join(unknown)}; parts:" if unknown else "--jobs takes 1 or more; parts:"
            print(what, ", ".join(known), file=sys.stderr)
            return 2
        if options.list:
            for one in known.values():
                print(f"{one.name:18s} {one.seconds:5.0f} s  {one.missing or one.what}")
            return 0
        options.logs.mkdir(parents=True, exist_ok=True)
        end = time.monotonic() + options.deadline
        run = Run(wanted, here, environment, options.logs, options.output, options.commit or _commit(), end)
        chosen = [known[name] for name in wanted]
        run.all(chosen, options.jobs)
    show({name: run.results[name] for name in wanted})
    print(f"\nwritten to {options.output}; what each part said is in {options.logs}")
    failed = any(one.failed for one in run.results.values())
    return 1 if failed or not any(one.ran for one in run.results.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
