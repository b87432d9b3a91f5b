"""VAE Stream Decode plays its video on the node, in both ways in which the frontend draws nodes."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from longlive.tests.host.stand_in import with_stand_ins

API = Path(__file__).resolve().parents[2] / "workflows" / "api" / "text_to_video_longlive2.json"
VIDEOS = "() => [...document.querySelectorAll('video')].filter(v => v.readyState > 0 && v.currentSrc.includes('.mp4')).length"


@pytest.fixture(params=[False, True], ids=["classic", "nodes_2"])
def drawn(request, frontend):
    """The frontend set to classic nodes or to Nodes 2.0; classic again afterwards."""

    def choose(value: bool) -> None:
        frontend.page.evaluate("(value) => app.extensionManager.setting.set('Comfy.VueNodes.Enabled', value)", value)

    choose(request.param)
    yield frontend
    choose(False)


def test_video_is_shown(drawn, client, screenshots, request):
    workflow = with_stand_ins(json.loads(API.read_text(encoding="utf-8")))
    # Another size than the other tests, so that nothing comes from the cache; long enough for a preview, were one sent.
    workflow["6"]["inputs"].update(width=96, seconds=3.0 if "classic" in request.node.name else 3.1)
    drawn.open_api(workflow, "video_on_the_node")
    drawn.fix_seeds()
    drawn.fit_view()
    before = set(client.get("/history"))
    drawn.queue()
    deadline = time.monotonic() + 300
    while not set(client.get("/history")) - before:
        assert time.monotonic() < deadline, "nothing was finished within 300 s"
        drawn.page.wait_for_timeout(300)
    drawn.page.wait_for_function(f"() => ({VIDEOS})() === 1", timeout=30_000)
    drawn.screenshot(screenshots / f"{request.node.callspec.id}_video.png")
    assert drawn.problems == []
