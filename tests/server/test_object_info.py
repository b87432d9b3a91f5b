"""What the running server tells the frontend about our nodes."""

from __future__ import annotations

import re

DISPLAY_NAMES: dict[str, str] = {
    "LongLiveLoadDiT": "Load LongLive DiT",
    "LongLiveAttentionAccelerator": "Attention Accelerator",
    "LongLivePromptTimeline": "Prompt Timeline",
    "LongLiveChunkedSampler": "Chunked Sampler",
    "LongLiveStreamDecode": "VAE Stream Decode",
    "LongLiveEmptyLatent": "Empty LongLive Latent",
    "LongLiveSaveState": "Save LongLive State",
    "LongLiveLoadState": "Load LongLive State",
}


def _ours(client) -> dict[str, dict]:
    return {name: info for name, info in client.get("/object_info").items() if info["python_module"] == "custom_nodes.longlive-stream"}


def _inputs(definition: dict, path: str = ""):
    """Every (path, options) of an /object_info input table, sub-inputs of dynamic combos included."""
    for group in ("required", "optional"):
        for name, spec in definition.get(group, {}).items():
            options = spec[1] if len(spec) > 1 else {}
            yield f"{path}{name}", options
            for choice in options.get("options", []):
                if isinstance(choice, dict) and "inputs" in choice:
                    yield from _inputs(choice["inputs"], f"{path}{name}.{choice['key']}.")


def test_nodes_are_registered_under_their_names(client):
    ours = _ours(client)
    assert {name: info["display_name"] for name, info in ours.items()} == {name: DISPLAY_NAMES[name] for name in ours}
    assert set(ours) == set(DISPLAY_NAMES)
    assert {info["category"] for info in ours.values()} == {"LongLive"}


def test_every_input_has_a_tooltip(client):
    silent = [f"{node}: {path}" for node, info in _ours(client).items() for path, options in _inputs(info["input"]) if not options.get("tooltip")]
    assert silent == []


def test_every_node_describes_itself_and_its_outputs(client):
    for name, info in _ours(client).items():
        assert info["description"], name
        assert len(info["output_tooltips"]) == len(info["output"]) and all(info["output_tooltips"]), name


def test_every_node_has_a_help_page(client):
    for name in DISPLAY_NAMES:
        page = client.fetch(f"/extensions/longlive-stream/docs/{name}.md").decode()
        assert page.startswith("# "), name
        pictures = re.findall(r"!\[[^\]]*\]\(([^)]+)\)", page)
        assert pictures, f"the help page of {name} has no picture"
        for picture in pictures:
            assert client.fetch(f"/extensions/longlive-stream/docs/{picture}"), f"{name}: {picture}"


def test_log_has_no_import_error(server):
    """Only lines about our two packs count: a ComfyUI may lack optional packages of its own."""
    lines = [line for line in server.log_tail(1_000_000).splitlines() if "longlive" in line.lower()]
    assert any("seconds" in line and "longlive-stream" in line for line in lines)
    complaints = ("Cannot import", "IMPORT FAILED", "Error while calling comfy_entrypoint", "due to the lack of", "Unable to parse pyproject")
    assert [line for line in lines if any(complaint in line for complaint in complaints)] == []
