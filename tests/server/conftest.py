"""A real ComfyUI server, started once for all tests of this folder, with this package and the stand-in pack in its custom_nodes."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from longlive.tests.host.locate import Host, find_existing
from longlive.tests.host.server import Client, Server

PACKAGE = "longlive-stream"
STAND_IN = "longlive_stand_in"


@pytest.fixture(scope="session")
def host(comfyui_path: Path) -> Host:
    """The ComfyUI under test. It runs in the Python that runs the tests, unless COMFYUI_PYTHON names another."""
    if os.environ.get("COMFYUI_PATH") and os.environ.get("COMFYUI_PYTHON"):
        return find_existing()
    return Host(comfyui_path, Path(sys.executable), "the tests' own Python")


@pytest.fixture(scope="session")
def packs(checkout: Path) -> dict[str, Path]:
    """What is linked into custom_nodes."""
    return {PACKAGE: checkout, STAND_IN: checkout / "tests" / "pack" / STAND_IN}


@pytest.fixture(scope="session")
def server(host: Host, packs: dict[str, Path], tmp_path_factory: pytest.TempPathFactory):
    """A running server; the end of its log is in the report of a test that fails."""
    with Server(host, tmp_path_factory.mktemp("comfyui"), packs) as running:
        yield running


@pytest.fixture(scope="session")
def client(server: Server) -> Client:
    return Client(server.url)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo):
    outcome = yield
    report = outcome.get_result()
    server = getattr(item, "funcargs", {}).get("server")
    if report.failed and server is not None:
        report.sections.append(("end of the ComfyUI log", server.log_tail()))
