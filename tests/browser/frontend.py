"""ComfyUI's real frontend in a headless Chrome, Edge or Chromium, driven by Playwright. Used by the tests of this folder and by make_workflows.py."""

from __future__ import annotations

import json
import os
import shutil
import sys
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path

# root in a container has no sandbox; the rest keeps the browser from looking for its maker's hosts, which a closed network answers with endless retries.
BROWSER_ARGUMENTS = (
    "--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking --disable-component-update --disable-sync".split()
)
HOW_TO_GET_A_BROWSER = (
    "no Chrome, Edge or Chromium was found; install one (on Debian: apt-get install --no-install-recommends chromium), or set LONGLIVE_BROWSER to its program"
)
COMMANDS = ("google-chrome", "google-chrome-stable", "chromium", "chromium-browser", "microsoft-edge", "microsoft-edge-stable", "chrome", "msedge")
PLACES = (
    "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome",
    "/Applications/Chromium.app/Contents/MacOS/Chromium",
    "/Applications/Microsoft Edge.app/Contents/MacOS/Microsoft Edge",
    "{PROGRAMFILES}/Google/Chrome/Application/chrome.exe",
    "{PROGRAMFILES(X86)}/Google/Chrome/Application/chrome.exe",
    "{LOCALAPPDATA}/Google/Chrome/Application/chrome.exe",
    "{PROGRAMFILES(X86)}/Microsoft/Edge/Application/msedge.exe",
    "{PROGRAMFILES}/Microsoft/Edge/Application/msedge.exe",
)
SIZE = {"width": 1600, "height": 1000}


# What ComfyUI's own frontend complains about with nothing of ours on the page. Each entry: a part of the message or of its address, and why it is not ours.
NOT_OURS = (
    "/api/userdata",  # a fresh user directory has no saved settings, workflows or templates yet
    "/user.css",  # the same
    "/templates/",  # core's template collection is an optional package of hundreds of megabytes
    "Error loading core workflow templates",
    "Error loading fuse options",
    "ComfyApp graph accessed before initialization",  # the frontend's own start
    "violates the following Content Security Policy",  # the test server is offline, so the sizes of missing model files cannot be asked for
    "violates the document's Content Security Policy",
)


class BrowserError(RuntimeError):
    """The browser or the frontend did not do what was asked; the message says what was seen."""


def find_browser(environment: Mapping[str, str] = os.environ, which: Callable[[str], str | None] = shutil.which) -> str:
    """The program of an installed browser, or BrowserError with how to get one."""
    named = environment.get("LONGLIVE_BROWSER")
    if named:
        if not Path(named).is_file():
            raise BrowserError(f"LONGLIVE_BROWSER is {named}, which is not a file")
        return named
    for command in COMMANDS:
        if found := which(command):
            return found
    for place in PLACES:
        variable = place[1 : place.index("}")] if place.startswith("{") else None
        path = place if variable is None else environment.get(variable, "") + place[len(variable) + 2 :]
        if Path(path).is_file():
            return path
    raise BrowserError(HOW_TO_GET_A_BROWSER)


class Frontend:
    """One page of the frontend of the server at ``url``. ``problems`` collects what the console complains about."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.problems: list[str] = []

    def __enter__(self) -> Frontend:
        from playwright.sync_api import sync_playwright

        self._playwright = sync_playwright().start()
        try:
            self._browser = self._playwright.chromium.launch(executable_path=find_browser(), args=BROWSER_ARGUMENTS)
            self.page = self._browser.new_page(viewport=SIZE)
            self.page.on("console", self._heard)
            self.page.on("pageerror", lambda error: self.problems.append(f"uncaught: {error}"))
            # For a new user the template browser opens by itself, at a moment of its own; the tests open it when they want it.
            self._set("Comfy.TutorialCompleted", True)
            self._set("Comfy.Minimap.Visible", False)
            self.page.goto(self.url)
            self.page.wait_for_function("() => window.app?.graph && window.app.extensionManager?.command && window.app.vueAppReady !== false", timeout=90_000)
            self.page.wait_for_function("() => app.graph.nodes.length > 0", timeout=30_000)
            self.page.wait_for_timeout(500)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if hasattr(self, "_browser"):
            self._browser.close()
        self._playwright.stop()

    def _set(self, setting: str, value: object) -> None:
        request = urllib.request.Request(f"{self.url}/settings/{setting}", json.dumps(value).encode(), {"Content-Type": "application/json"})
        urllib.request.urlopen(request, timeout=30).close()

    def _heard(self, message) -> None:
        text = f"{message.text} ({message.location.get('url', '')})"
        if message.type == "error" and not any(part in text for part in NOT_OURS):
            self.problems.append(text)

    def open_template(self, name: str) -> None:
        """Open a shipped workflow the way a user does: template browser, the workflow's card."""
        page = self.page
        page.evaluate("() => app.graph.clear()")
        if not page.get_by_test_id("template-workflows-content").is_visible():
            page.evaluate("() => app.extensionManager.command.execute('Comfy.BrowseTemplates')")
        page.get_by_test_id("template-workflows-content").wait_for()
        card = page.get_by_test_id(f"template-workflow-{name}")
        card.first.wait_for(timeout=30_000)
        card.first.click()
        page.wait_for_function("() => app.graph.nodes.length > 0", timeout=30_000)
        page.get_by_test_id("template-workflows-content").wait_for(state="hidden")

    def open_api(self, workflow: Mapping[str, dict], name: str) -> None:
        """Open an API workflow; the frontend lays the nodes out."""
        self.page.evaluate("([workflow, name]) => app.loadApiJson(workflow, name)", [workflow, name])
        self.page.wait_for_timeout(300)

    def fix_seeds(self) -> None:
        """Keep every seed as it is after a run; a loaded API workflow would draw a new one."""
        self.page.evaluate(
            "() => app.graph.nodes.forEach(n => n.widgets?.forEach(w => { if (w.name.startsWith('control_after_generate')) w.value = 'fixed' }))"
        )

    def fit_view(self) -> None:
        """Show the whole graph."""
        self.page.evaluate("() => app.extensionManager.command.execute('Comfy.Canvas.FitView')")
        self.page.wait_for_timeout(600)

    def unknown_types(self) -> list[str]:
        """Types of the nodes on the canvas that the server does not know."""
        return self.page.evaluate("() => app.graph.nodes.map(n => n.type).filter(t => !(t in LiteGraph.registered_node_types))")

    def prompt(self) -> dict:
        """The canvas as an API workflow."""
        return json.loads(self.page.evaluate("async () => JSON.stringify((await app.graphToPrompt()).output)"))

    def workflow(self) -> dict:
        """The canvas as the frontend saves it."""
        return json.loads(self.page.evaluate("() => JSON.stringify(app.graph.serialize())"))

    def queue(self) -> None:
        """Press Run, in effect."""
        self.page.evaluate("() => app.queuePrompt(0)")

    def screenshot(self, path: Path, **options: object) -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.page.screenshot(path=str(path), **options)
        return path


if __name__ == "__main__":
    sys.stdout.write(find_browser() + "\n")
