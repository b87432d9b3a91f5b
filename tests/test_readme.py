"""README.md: its links lead somewhere, and it names every workflow and every node."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
HEADINGS = {re.sub(r"[^\w -]", "", line.lstrip("# ").lower()).replace(" ", "-") for line in README.splitlines() if line.startswith("#")}
LOCAL_LINKS = sorted({link for link in re.findall(r"\]\(([^)]+)\)", README) if not link.startswith("http")})


@pytest.mark.parametrize("link", LOCAL_LINKS)
def test_local_links_lead_somewhere(link):
    path, _, heading = link.partition("#")
    assert not path or (ROOT / path).is_file()
    assert not heading or heading in HEADINGS


@pytest.mark.parametrize("workflow", sorted(path.stem for path in (ROOT / "workflows").glob("*.json")))
def test_every_workflow_is_named(workflow):
    assert f"`{workflow}`" in README


@pytest.mark.parametrize("page", sorted((ROOT / "nodes" / "web" / "docs").glob("*.md")), ids=lambda path: path.stem)
def test_every_node_is_linked_under_its_display_name(page):
    title = page.read_text(encoding="utf-8").splitlines()[0].lstrip("# ")
    assert f"[{title}](nodes/web/docs/{page.name})" in README
