"""Registers the checkout as the package ``longlive`` and prepares an in-process ComfyUI; holds no test helpers beyond that.

Tests write ``from longlive.accel import window`` and, for helpers, ``from longlive.tests.host import ...``. ComfyUI comes from COMFYUI_PATH, else from the
one that ``python run.py test`` installed into this checkout. Tests under tests/accel and tests/kernels need none.
"""

import importlib.util
import os
import shutil
import sys
import tempfile
from pathlib import Path

import pytest

PACKAGE = "longlive-stream"
STAND_IN = "longlive_stand_in"
ROOT = Path(__file__).resolve().parent.parent


def _register_package() -> None:
    """Make the checkout importable as ``longlive``, whatever its folder is called."""
    # Our nodes/ would hide ComfyUI's nodes.py if the checkout itself were importable (python -m pytest puts the current folder first).
    sys.path[:] = [entry for entry in sys.path if Path(entry or os.getcwd()).resolve() != ROOT]
    spec = importlib.util.spec_from_file_location("longlive", ROOT / "__init__.py", submodule_search_locations=[str(ROOT)])
    module = importlib.util.module_from_spec(spec)
    sys.modules["longlive"] = module
    spec.loader.exec_module(module)


def _prepare_comfyui() -> tuple[Path | None, Path | None]:
    """Put ComfyUI first on sys.path, on the CPU, with a base directory of its own; return (its folder, the base directory)."""
    comfyui = Path(os.environ.get("COMFYUI_PATH") or ROOT / ".comfy" / "ComfyUI").resolve()
    if not (comfyui / "comfy" / "cli_args.py").is_file():
        return None, None
    sys.path.insert(0, str(comfyui))
    base = Path(tempfile.mkdtemp(prefix="longlive-tests-"))
    from comfy.cli_args import args

    args.cpu = True
    args.base_directory = str(base)
    args.disable_api_nodes = True
    return comfyui, base


COMFYUI, BASE_DIRECTORY = _prepare_comfyui()
_register_package()


def pytest_unconfigure() -> None:
    if BASE_DIRECTORY is not None:
        shutil.rmtree(BASE_DIRECTORY, ignore_errors=True)


@pytest.fixture(scope="session")
def checkout() -> Path:
    """The root folder of this repository."""
    return ROOT


@pytest.fixture(scope="session")
def comfyui_path() -> Path:
    """The folder of the ComfyUI that the tests run against."""
    if COMFYUI is None:
        pytest.fail("no ComfyUI: COMFYUI_PATH is not set or not a ComfyUI folder; `python run.py test` finds or installs one")
    return COMFYUI


@pytest.fixture(scope="session")
def host(comfyui_path: Path):
    """The ComfyUI under test. It runs in the Python that runs the tests, unless COMFYUI_PYTHON names another."""
    from longlive.tests.host.locate import Host, find_existing

    if os.environ.get("COMFYUI_PATH") and os.environ.get("COMFYUI_PYTHON"):
        return find_existing()
    return Host(comfyui_path, Path(sys.executable), "the tests' own Python")


@pytest.fixture(scope="session")
def packs() -> dict[str, Path]:
    """What is linked into custom_nodes: this package and the stand-in loaders."""
    return {PACKAGE: ROOT, STAND_IN: ROOT / "tests" / "pack" / STAND_IN}


@pytest.fixture(scope="session")
def server(host, packs: dict[str, Path], tmp_path_factory: pytest.TempPathFactory):
    """A real ComfyUI server, one for the whole run; the end of its log is in the report of a test that fails."""
    from longlive.tests.host.server import Server

    with Server(host, tmp_path_factory.mktemp("comfyui"), packs) as running:
        yield running


@pytest.fixture(scope="session")
def client(server):
    """Talks to that server over HTTP."""
    from longlive.tests.host.server import Client

    return Client(server.url)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item):
    outcome = yield
    report = outcome.get_result()
    server = getattr(item, "funcargs", {}).get("server")
    if report.failed and server is not None:
        report.sections.append(("end of the ComfyUI log", server.log_tail()))
