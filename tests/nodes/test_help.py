"""Every node has a help page in plain Markdown that names each of its inputs."""

import re

import pytest
from longlive.nodes.extension import NODES

# Inputs whose options are the files found on this machine.
FILE_LISTS = {"file", "dit_name", "adapter"}
SCHEMAS = {node.GET_SCHEMA().node_id: node.GET_SCHEMA() for node in NODES}


def input_names(inputs):
    """The ids of inputs as a user sees them, those inside a dynamic combo included."""
    for item in inputs:
        yield item.id
        for option in getattr(item, "options", None) or []:
            yield from input_names(getattr(option, "inputs", None) or [])


@pytest.fixture
def docs(checkout):
    return checkout / "nodes" / "web" / "docs"


@pytest.mark.parametrize("node_id", SCHEMAS)
def test_the_page_has_the_display_name_and_names_every_input(docs, node_id):
    page = (docs / f"{node_id}.md").read_text(encoding="utf-8")
    assert page.splitlines()[0] == f"# {SCHEMAS[node_id].display_name}"
    missing = [name for name in input_names(SCHEMAS[node_id].inputs) if f"`{name}`" not in page]
    assert not missing


@pytest.mark.parametrize("node_id", SCHEMAS)
def test_the_page_names_no_input_that_is_gone(docs, node_id):
    page = (docs / f"{node_id}.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`.*?`) \|", page.partition("## Inputs")[2].partition("\n## ")[0], re.MULTILINE)
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    assert named == set(input_names(SCHEMAS[node_id].inputs))


@pytest.mark.parametrize("node_id", SCHEMAS)
def test_every_combo_option_is_explained(docs, node_id):
    page = (docs / f"{node_id}.md").read_text(encoding="utf-8")
    for item in SCHEMAS[node_id].inputs:
        keys = [option if isinstance(option, str) else option.key for option in getattr(item, "options", None) or []]
        # Lists of files and long lists are no choice that a page spells out.
        if len(keys) <= 4 and item.id not in FILE_LISTS:
            assert not [key for key in keys if f"`{key}`" not in page], item.id


@pytest.mark.parametrize("node_id", SCHEMAS)
def test_pictures_are_referenced_as_the_frontend_serves_them(docs, node_id):
    """The frontend puts /extensions/<package>/docs/ before a relative address, for every page."""
    page = (docs / f"{node_id}.md").read_text(encoding="utf-8")
    assert re.findall(r"!\[[^\]]+\]\(([^)]+)\)", page)[0] == f"img/{node_id}.png"
    assert not re.search(r"<(img|video|script)", page)


@pytest.mark.parametrize("node_id", SCHEMAS)
def test_every_input_has_a_tooltip(node_id):
    for item in SCHEMAS[node_id].inputs:
        assert item.tooltip, item.id
        for option in getattr(item, "options", None) or []:
            assert all(inner.tooltip for inner in getattr(option, "inputs", None) or [])
