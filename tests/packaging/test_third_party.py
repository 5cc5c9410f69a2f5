"""A stranger's package in a scratch environment: found, selected, its route admitted; and every way it can be wrong.

The package is ``third_party/``. A wrong variant is the installed package with one line changed, in a folder of its
own that one child process has on its path.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.packaging.environments import Environment, checked

SOURCE = Path(__file__).parent / "third_party"
Run = Callable[..., "subprocess.CompletedProcess[str]"]
Variant = Callable[..., Path]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package as pip lays it out, in a folder to copy from."""
    source = tmp_path_factory.mktemp("source") / "halma-echo"
    target = tmp_path_factory.mktemp("installed")
    shutil.copytree(SOURCE, source)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-deps", "--no-index"]
    checked([*pip, "--no-build-isolation", "--no-compile", "--target", target, source])
    return target


@pytest.fixture
def variant(installed: Path, tmp_path: Path) -> Callable[..., Path]:
    """The installed package with one change in its module, or another name of the distribution: a child's path."""

    def make(old: str = "", new: str = "", *, name: str = "halma-echo") -> Path:
        site = Path(shutil.copytree(installed, tmp_path / "site"))
        module = site / "halma_echo.py"
        text = module.read_text(encoding="utf-8")
        assert not old or text.count(old) == 1, f"{old!r} is there {text.count(old)} times"
        module.write_text(text.replace(old, new) if old else text, encoding="utf-8")
        (metadata,) = site.glob("*.dist-info/METADATA")
        said = metadata.read_text(encoding="utf-8")
        assert said.count("Name: halma-echo\n") == 1
        metadata.write_text(said.replace("Name: halma-echo\n", f"Name: {name}\n"), encoding="utf-8")
        metadata.parent.rename(site / f"{name.replace('-', '_')}-0.3.0.dist-info")
        return site

    return make


@pytest.fixture(scope="module")
def stranger(scratch: Environment, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """The scratch environment with the stranger's package installed as a user would."""
    source = tmp_path_factory.mktemp("stranger") / "halma-echo"
    shutil.copytree(SOURCE, source)
    scratch.install(source)
    return scratch


@pytest.fixture
def halma(scratch: Environment) -> Run:
    """``python -m halma`` of the scratch environment."""
    return lambda *arguments, **options: scratch.run("-m", "halma", *arguments, **options)


SELECT = """
import torch, halma
from halma.hal.op_table import table
from halma.hal.registry import default_registry
from halma.hal.dispatch import Ops
from halma.hal.testing.admission import Gate
from halma.hal.workspace import Workspace
import halma.ops.examples, halma.ops.families

backend = halma.backend({name!r})
default_registry().load_routes()
x, weight = torch.randn(3, 64), torch.randn(64)
outcomes = {{}}
for routes in ({{}}, {{"rms_norm": "reference"}}):
    ops = Ops(Workspace(), backend=backend.name, routes=routes, admission=Gate(backend))
    decision = ops.explain("rms_norm", x, weight, 1e-6)
    outcomes[decision.chosen] = ops.rms_norm(x, weight, 1e-6).clone()
route = next(route for route in table.get("rms_norm").routes if route.name == "echo")
print(backend.name, backend.evidence, halma.__file__)
print(sorted(outcomes), route.origin)
print(all(torch.allclose(outcomes["reference"], other, atol=1e-5) for other in outcomes.values()))
"""


def test_it_is_found_and_selected_and_its_route_is_admitted_and_used(stranger: Environment) -> None:
    done = stranger.run("-c", SELECT.format(name="echo"))
    assert done.returncode == 0, done.stderr
    first, second, third = done.stdout.splitlines()
    assert first.startswith("echo cpu ")
    assert str(stranger.python.parents[1]) in first, "the wheel in the scratch environment is what runs"
    assert second == "['echo', 'reference'] halma-echo"
    assert third == "True"


def test_it_is_listed_without_torch_and_is_usable(stranger: Environment, halma: Run) -> None:
    done = halma("backends")
    assert done.returncode == 0, done.stderr
    assert "echo" in done.stdout
    found = statuses(stranger)
    assert found["echo"] == [True, "repeats what the CPU says"]
    assert found["torch"] is False


def test_the_environment_variable_selects_it(stranger: Environment, halma: Run) -> None:
    assert halma("backends", env={"HALMA_BACKEND": "echo"}).returncode == 0
    done = halma("backends", env={"HALMA_BACKEND": "ecko"})
    assert done.returncode == 2
    assert 'did you mean "echo"?' in done.stderr


def test_the_suite_in_the_wheel_runs_for_it(stranger: Environment, halma: Run) -> None:
    done = halma("conformance", "--backend", "echo", "--rule", "G12", "--rule", "W6", "--json")
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert (answer["backend"], answer["evidence"], list(answer["rules"])) == ("echo", "cpu", ["G12", "W6"])
    assert all(rule["verdict"] == "passed" and rule["controls"] for rule in answer["rules"].values())


STATUSES = """
import json, sys
from halma.hal.registry import default_registry
found = {status.name: [status.usable, status.reason] for status in default_registry().statuses()}
print(json.dumps({**found, "torch": "torch" in sys.modules}))
"""


def statuses(environment: Environment, *path: Path) -> dict[str, Any]:
    """Every backend of the environment with its verdict, and whether listing them imported torch."""
    done = environment.run("-c", STATUSES, path=path)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


WRONG = [
    pytest.param(
        "from __future__ import annotations",
        "from __future__ import annotations\n\nimport the_vendors_driver",
        "importing halma_echo failed: ModuleNotFoundError: No module named 'the_vendors_driver'",
        id="import error",
    ),
    pytest.param(
        "BackendSpec(NAME, API_VERSION, probe",
        "BackendSpec(NAME, API_VERSION + 1, probe",
        "backend 'echo' is written for api_version 2; this halma speaks 1 and 0",
        id="newer api_version",
    ),
    pytest.param(
        "BackendSpec(NAME, API_VERSION, probe",
        "BackendSpec(NAME, API_VERSION - 2, probe",
        "backend 'echo' is written for api_version -1; this halma speaks 1 and 0",
        id="older api_version",
    ),
    pytest.param(
        "def halma_register_backends(", "def halma_register_backend(", "halma_register_backend", id="misspelt hook"
    ),
    pytest.param(
        "def halma_register_backends(register: Callable[[BackendSpec], None]) -> None:\n    register(",
        "def halma_register_backends(registrar: Callable[[BackendSpec], None]) -> None:\n    registrar(",
        "registrar",
        id="misspelt argument",
    ),
    pytest.param('NAME = "echo"', 'NAME = "ekko"', "registers ekko, its entry point is called 'echo'", id="other name"),
    pytest.param(
        '    return Probe(True, "repeats what the CPU says", {"echo": "0.3.0"})',
        '    raise RuntimeError("the driver answered 46")',
        "its probe failed: RuntimeError: the driver answered 46",
        id="probe raises",
    ),
]


@pytest.mark.parametrize(("old", "new", "reason"), WRONG)
def test_each_wrong_way_is_that_backends_reason_and_hides_no_other(
    scratch: Environment, halma: Run, variant: Variant, old: str, new: str, reason: str
) -> None:
    site = variant(old, new)
    found = statuses(scratch, site)
    assert found["cpu"][0], found["cpu"]
    assert not found["echo"][0]
    assert reason in found["echo"][1]
    named = halma("backends", path=[site], env={"HALMA_BACKEND": "echo"})
    other = halma("backends", path=[site], env={"HALMA_BACKEND": "cpu"})
    assert (named.returncode, other.returncode) == (2, 0), named.stderr + other.stderr
    for done in (named, other):
        shown = " ".join((done.stdout + done.stderr).split())
        assert reason in shown
        assert "Traceback" not in shown


def test_two_distributions_with_one_name_are_refused_naming_both(
    stranger: Environment, halma: Run, variant: Variant
) -> None:
    site = variant(name="halma-mockingbird")
    done = halma("generate", "--prompt", "x", "--backend", "echo", path=[site])
    assert done.returncode == 2
    assert 'backend "echo" is refused' in done.stderr
    assert "claimed by halma-echo 0.3.0 and by halma-mockingbird 0.3.0" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("wanted", ["halma-echo", "halma-mockingbird"])
def test_the_allow_list_settles_who_is_meant(stranger: Environment, halma: Run, variant: Variant, wanted: str) -> None:
    site = variant(name="halma-mockingbird")
    done = halma("backends", path=[site], env={"HALMA_PLUGINS": wanted, "HALMA_BACKEND": "echo"})
    assert done.returncode == 0, done.stderr


def test_a_factory_that_fails_is_reported_when_it_is_selected(halma: Run, variant: Variant) -> None:
    site = variant('    """The factory."""', '    raise OSError("the device fell off the bus")')
    done = halma("generate", "--prompt", "x", "--backend", "echo", path=[site])
    assert done.returncode == 2
    assert 'backend "echo" could not be started' in done.stderr
    assert "the device fell off the bus" in done.stderr
    assert "Traceback" not in done.stderr
