"""Makes workflows/*.json and their thumbnails from workflows/api/*.json through the real frontend, and the pictures of the nodes for the help pages.

The API files are the source. Run it after changing one, or after a node gained an input:

    python tests/browser/make_workflows.py [name ...]
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))

from browser.frontend import Frontend  # noqa: E402
from browser.layout import PICTURES, place  # noqa: E402
from host.install import Installer  # noqa: E402
from host.locate import Host, find_existing  # noqa: E402
from host.server import Client, Server  # noqa: E402

# Where a user gets the files that the loaders name: the frontend offers them for download. The folder is core's.
WAN_22 = "https://huggingface.co/Comfy-Org/Wan_2.2_ComfyUI_Repackaged/resolve/main/split_files"
WAN_21 = "https://huggingface.co/Comfy-Org/Wan_2.1_ComfyUI_repackaged/resolve/main/split_files"
SOURCES = {
    "umt5_xxl_fp8_e4m3fn_scaled.safetensors": (f"{WAN_21}/text_encoders/umt5_xxl_fp8_e4m3fn_scaled.safetensors", "text_encoders"),
    "umt5_xxl_fp16.safetensors": (f"{WAN_21}/text_encoders/umt5_xxl_fp16.safetensors", "text_encoders"),
    "lora.pt": ("https://huggingface.co/Efficient-Large-Model/LongLive-1.3B/resolve/main/models/lora.pt", "loras"),
    "model_bf16.pt": ("https://huggingface.co/Efficient-Large-Model/LongLive-2.0-5B/resolve/main/model_bf16.pt", "diffusion_models"),
    "longlive_base.pt": ("https://huggingface.co/Efficient-Large-Model/LongLive-1.3B/resolve/main/models/longlive_base.pt", "diffusion_models"),
    "wan2.2_vae.safetensors": (f"{WAN_22}/vae/wan2.2_vae.safetensors", "vae"),
    "wan_2.1_vae.safetensors": (f"{WAN_21}/vae/wan_2.1_vae.safetensors", "vae"),
}
PICTURES_FOLDER = ROOT / "nodes" / "web" / "docs" / "img"
# The workflow that README.md shows as a whole.
README_PICTURE = "text_to_video_longlive2"
VIEWPORT = {"width": 1700, "height": 1000}
# The part of the page without menus: left, top, right and bottom edge in pixels.
CLEAR = (80, 90, 1680, 980)
# Shows the rectangle [x, y, width, height] of the graph as large as fits into CLEAR, at most at `limit`; returns the page rectangle it then covers.
SHOW = """([rectangle, clear, limit]) => {
    const [x, y, width, height] = rectangle;
    const scale = Math.min((clear[2] - clear[0]) / width, (clear[3] - clear[1]) / height, limit);
    const canvas = document.querySelector('#graph-canvas').getBoundingClientRect();
    app.canvas.ds.scale = scale;
    app.canvas.ds.offset = [(clear[0] - canvas.x) / scale - x, (clear[1] - canvas.y) / scale - y];
    app.canvas.setDirty(true, true);
    return {x: clear[0], y: clear[1], width: width * scale, height: height * scale};
}"""
# The rectangle around the named nodes with their title bars and name badges and a margin; with no name around everything, groups and bends of links included.
BOUNDS = """(names) => {
    const nodes = app.graph.nodes.filter(n => !names?.length || names.includes(String(n.id))), margin = 24, above = 56;
    const boxes = nodes.map(n => [n.pos[0], n.pos[1] - above, n.pos[0] + n.size[0], n.pos[1] + n.size[1]]);
    if (!names?.length) boxes.push(
        ...app.graph.groups.map(g => [g.pos[0], g.pos[1], g.pos[0] + g.size[0], g.pos[1] + g.size[1]]),
        ...[...app.graph.reroutes.values()].map(r => [r.pos[0], r.pos[1], r.pos[0], r.pos[1]]),
    );
    const left = Math.min(...boxes.map(b => b[0])) - margin, top = Math.min(...boxes.map(b => b[1])) - margin;
    const right = Math.max(...boxes.map(b => b[2])) + margin, bottom = Math.max(...boxes.map(b => b[3])) + margin;
    return [left, top, right - left, bottom - top];
}"""


def main(names: list[str]) -> None:
    installer = Installer(ROOT / ".comfy", lambda text: sys.stdout.write(text + "\n"))
    host = find_existing() or installer.comfyui()
    tools = installer.test_tools(host.python)
    if "--inside" not in names:
        # Playwright is installed for the host's Python, so that is the one to go on in.
        code = "import runpy, sys; sys.path.append(sys.argv.pop(1)); sys.argv.pop(0); runpy.run_path(sys.argv[0], run_name='__main__')"
        raise SystemExit(subprocess.run([str(host.python), "-c", code, str(tools), __file__, "--inside", *names]).returncode)
    make(host, [name for name in names if name != "--inside"])


def make(host: Host, names: list[str]) -> None:
    """Write the named workflows, or all, and every node's picture."""
    packs = {"longlive-stream": ROOT, "longlive_stand_in": ROOT / "tests" / "pack" / "longlive_stand_in"}
    base = ROOT / ".comfy" / "make"
    # Empty files under the names that the loaders look for: no picture shall show a loader marked as missing its file.
    for name, (_, folder) in SOURCES.items():
        (base / "models" / folder).mkdir(parents=True, exist_ok=True)
        (base / "models" / folder / name).touch()
    with Server(host, base, packs) as server, Frontend(server.url) as frontend:
        frontend.page.set_viewport_size(VIEWPORT)
        # No badges over the canvas, the classic nodes, and text at every zoom.
        settings = {"Comfy.Graph.CanvasInfo": False, "Comfy.Graph.CanvasMenu": False, "Comfy.VueNodes.Enabled": False, "LiteGraph.Canvas.MinFontSizeForLOD": 0}
        for setting, value in settings.items():
            frontend.page.evaluate("([setting, value]) => app.extensionManager.setting.set(setting, value)", [setting, value])
        client = Client(server.url)
        for api in sorted((ROOT / "workflows" / "api").glob("*.json")):
            if not names or api.stem in names:
                make_workflow(frontend, client, api)
        if not names:
            ours = [name for name, info in client.get("/object_info").items() if info["python_module"] == "custom_nodes.longlive-stream"]
            for node in ours:
                make_picture(frontend, node)


def make_workflow(frontend: Frontend, client: Client, api: Path) -> None:
    """One API file to its UI twin and thumbnail."""
    # The frontend gives an input that is left out what a node of the same id had in the workflow before, so all defaults are put in first.
    frontend.open_api(client.with_defaults(json.loads(api.read_text(encoding="utf-8"))), api.stem)
    frontend.fix_seeds()
    api.write_text(json.dumps(frontend.prompt(), indent=1) + "\n", encoding="utf-8")
    place(frontend, api.stem)
    workflow = frontend.workflow()
    for node in workflow["nodes"]:
        models = [name for name in node.get("widgets_values", []) if isinstance(name, str) and name in SOURCES]
        if models:
            node["properties"]["models"] = [{"name": name, "url": SOURCES[name][0], "directory": SOURCES[name][1]} for name in models]
    workflow["extra"]["ds"] = first_view(frontend)
    target = ROOT / "workflows" / api.name
    target.write_text(json.dumps(workflow, indent=1) + "\n", encoding="utf-8")
    show_drawings(frontend)
    take_picture(frontend, target.with_suffix(".jpg"), 0.8, PICTURES.get(api.stem, ()), type="jpeg", quality=80)
    if api.stem == README_PICTURE:
        take_picture(frontend, PICTURES_FOLDER / "workflow.png", 1.0)
    sys.stdout.write(f"{target.name}: {len(workflow['nodes'])} nodes\n")


def first_view(frontend: Frontend) -> dict:
    """What a user sees on opening the workflow: as much of it as can be read, from its top left corner."""
    x, y, width, height = frontend.page.evaluate(BOUNDS)
    scale = max(min((CLEAR[2] - CLEAR[0]) / width, (CLEAR[3] - CLEAR[1]) / height), 0.6)
    return {"scale": round(scale, 3), "offset": [round(CLEAR[0] / scale - x), round(CLEAR[1] / scale - y)]}


def show_drawings(frontend: Frontend) -> None:
    """Run the part of the open workflow that its Preview Image nodes need, so that the picture shows what they show."""
    previews = [name for name, node in frontend.prompt().items() if node["class_type"] == "PreviewImage"]
    if previews:
        # A node gets its picture when it is drawn, so it has to be in view.
        frontend.page.evaluate(SHOW, [frontend.page.evaluate(BOUNDS, previews), CLEAR, 1.0])
        frontend.page.evaluate("(nodes) => app.queuePrompt(0, 1, nodes)", previews)
        frontend.page.wait_for_function("() => app.graph.nodes.some(n => n.type === 'PreviewImage' && n.imgs?.length)", timeout=60_000)
        # The note of the finished run goes away by itself.
        frontend.page.wait_for_timeout(7_000)


def make_picture(frontend: Frontend, node: str) -> None:
    """One node alone, as nodes/web/docs/img/<node>.png, which its help page shows."""
    frontend.page.evaluate(
        """(type) => {
        app.graph.clear();
        const node = LiteGraph.createNode(type);
        node.pos = [0, 0];
        app.graph.add(node);
        const long = node.widgets?.some(w => w.options?.multiline || w.type === 'customtext');
        node.setSize([Math.max(node.computeSize()[0], 360), Math.max(node.computeSize()[1], node.size[1]) + (long ? 60 : 0)]);
    }""",
        node,
    )
    target = PICTURES_FOLDER / f"{node}.png"
    take_picture(frontend, target, 1.0)
    sys.stdout.write(f"{target.name}\n")


def take_picture(frontend: Frontend, path: Path, limit: float, nodes: Sequence[str] = (), **options: object) -> None:
    """A picture of the whole graph or of some nodes, text boxes included, without the menus around it."""
    clip = frontend.page.evaluate(SHOW, [frontend.page.evaluate(BOUNDS, list(nodes)), CLEAR, limit])
    frontend.page.mouse.move(1690, 600)
    frontend.page.wait_for_timeout(700)
    frontend.page.screenshot(path=str(path), clip=clip, **options)


if __name__ == "__main__":
    main(sys.argv[1:])
