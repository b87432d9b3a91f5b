"""Fixtures of all tests; the checkout as the package ``longlive`` and an in-process ComfyUI are bootstrap.py's. Holds no test helpers beyond that.

Tests write ``from longlive.accel import window`` and, for helpers, ``from longlive.tests.host import ...``. ComfyUI comes from COMFYUI_PATH, else from the
one that ``python run.py test`` installed into this checkout. Tests under tests/accel and tests/kernels need none.
"""

import os
import sys
from pathlib import Path

import pytest

# pytest puts no folder of ours on sys.path.
sys.path.insert(0, str(Path(__file__).resolve().parent))
from bootstrap import COMFYUI, ROOT, clean_up

sys.path.remove(str(Path(__file__).resolve().parent))

PACKAGE = "longlive-stream"
STAND_IN = "longlive_stand_in"


def pytest_unconfigure() -> None:
    clean_up()


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
