"""The shipped workflows as files: complete sets, only core's nodes and ours, and what the stand-ins change in them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from longlive.tests.host.stand_in import STAND_INS, with_stand_ins

FOLDER = Path(__file__).resolve().parents[1] / "workflows"
API = sorted((FOLDER / "api").glob("*.json"))
TASKS = ("text_to_video", "timeline_with_cut", "start_image", "save_resume_extend", "accelerator_comparison", "prompt_switch")
SIZES = {"width", "height", "x", "y"}


def test_every_task_is_shipped_with_its_twin_and_thumbnail():
    names = [path.stem for path in API]
    assert [task for task in TASKS if not any(name.startswith(task) for name in names)] == []
    assert sorted(path.stem for path in FOLDER.glob("*.json")) == names
    assert sorted(path.stem for path in FOLDER.glob("*.jpg")) == names


@pytest.mark.parametrize("api", API, ids=lambda path: path.stem)
def test_stand_ins_change_loaders_and_size_alone(api):
    shipped = json.loads(api.read_text(encoding="utf-8"))
    small = with_stand_ins(shipped)
    assert list(small) == list(shipped)
    for name, node in shipped.items():
        if node["class_type"] in STAND_INS:
            assert small[name]["class_type"] == STAND_INS[node["class_type"]]
            continue
        assert small[name]["class_type"] == node["class_type"]
        changed = {key for key in node["inputs"] if small[name]["inputs"][key] != node["inputs"][key]}
        assert changed <= SIZES and small[name]["inputs"].keys() == node["inputs"].keys()


@pytest.mark.parametrize("api", API, ids=lambda path: path.stem)
def test_loaders_say_where_their_files_come_from(api):
    """The frontend offers missing files for download from properties.models."""
    workflow = json.loads((FOLDER / api.name).read_text(encoding="utf-8"))
    for node in workflow["nodes"]:
        if node["type"] in STAND_INS:
            named = {model["name"] for model in node["properties"]["models"]}
            assert named == {value for value in node["widgets_values"] if str(value).endswith((".pt", ".safetensors"))}


@pytest.mark.parametrize("api", API, ids=lambda path: path.stem)
def test_seeds_stay_fixed(api):
    workflow = json.loads((FOLDER / api.name).read_text(encoding="utf-8"))
    assert "randomize" not in [value for node in workflow["nodes"] for value in node.get("widgets_values", [])]
