"""Every shipped workflow, opened from the template browser in the real frontend."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from longlive.tests.host.stand_in import with_stand_ins

ROOT = Path(__file__).resolve().parents[2]
API = sorted((ROOT / "workflows" / "api").glob("*.json"))


def _without_titles(prompt: dict) -> dict:
    return {node: {"class_type": value["class_type"], "inputs": value["inputs"]} for node, value in prompt.items()}


@pytest.mark.parametrize("api", API, ids=lambda path: path.stem)
def test_workflow_opens_complete_and_equals_its_api_twin(frontend, screenshots, api):
    frontend.open_template(api.stem)
    frontend.fit_view()
    frontend.screenshot(screenshots / f"{api.stem}.png")
    assert frontend.unknown_types() == []
    assert _without_titles(frontend.prompt()) == _without_titles(json.loads(api.read_text(encoding="utf-8")))
    assert frontend.problems == []


@pytest.mark.parametrize("api", API, ids=lambda path: path.stem)
def test_workflow_runs_from_the_frontend_with_stand_in_loaders(frontend, screenshots, client, api):
    """Queued by the frontend itself, so what it does to widgets on the way is part of the test."""
    frontend.open_api(with_stand_ins(json.loads(api.read_text(encoding="utf-8"))), api.stem)
    frontend.fix_seeds()
    before = set(client.get("/history"))
    frontend.queue()
    deadline = time.monotonic() + 600
    while not (new := set(client.get("/history")) - before):
        assert time.monotonic() < deadline, "nothing was finished within 600 s"
        frontend.page.wait_for_timeout(500)
    entry = client.wait(new.pop(), seconds=10)
    frontend.page.wait_for_timeout(500)
    frontend.fit_view()
    frontend.screenshot(screenshots / f"{api.stem}_run.png")
    assert client.files(entry)
    assert frontend.problems == []
