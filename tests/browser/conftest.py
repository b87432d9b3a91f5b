"""The real frontend in a real browser, before the same server that tests/server uses."""

from __future__ import annotations

from pathlib import Path

import pytest
from longlive.tests.browser.frontend import Frontend


@pytest.fixture(scope="session")
def screenshots(checkout: Path) -> Path:
    """Where screenshots are kept; git ignores the folder."""
    folder = checkout / ".comfy" / "screenshots"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@pytest.fixture(scope="module")
def frontend(server):
    with Frontend(server.url) as page:
        yield page


@pytest.fixture(autouse=True)
def only_own_problems(frontend):
    """Each test starts with an empty list of console complaints."""
    frontend.problems.clear()
