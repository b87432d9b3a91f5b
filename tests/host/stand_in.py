"""Turns a shipped workflow into one that any CPU runs in seconds: the three loaders become stand-ins and the size shrinks; nothing else changes.

The real text encoder and VAE cannot be shrunk, which is why they are replaced at all.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping

# Loader in the shipped workflow: its stand-in, and the inputs that say which release is imitated.
STAND_INS = {
    "LongLiveLoadDiT": "LongLiveStandInDiT",
    "UNETLoader": "LongLiveStandInDiT",
    "CLIPLoader": "LongLiveStandInCLIP",
    "VAELoader": "LongLiveStandInVAE",
}
# Pixels; on the grid of both VAEs (32 for Wan 2.2's 16 times 2 patches, 16 for Wan 2.1's).
WIDTH, HEIGHT = 96, 64


def with_stand_ins(workflow: Mapping[str, dict]) -> dict[str, dict]:
    """Return a copy of an API workflow with stand-in loaders and a small size. Node ids and links stay."""
    small = copy.deepcopy(dict(workflow))
    release = release_of(workflow)
    for node in small.values():
        stand_in = STAND_INS.get(node["class_type"])
        if stand_in is not None:
            node["class_type"] = stand_in
            node["inputs"] = {"seed": 0} if stand_in == "LongLiveStandInCLIP" else {"model": release, "seed": 0}
        else:
            for name, value in node["inputs"].items():
                node["inputs"][name] = shrunk(name, value)
    return small


def release_of(workflow: Mapping[str, dict]) -> str:
    """Which release a workflow is for, from the VAE file it names."""
    files = " ".join(str(node["inputs"].get("vae_name", "")) for node in workflow.values()).lower()
    return "LongLive 1.0" if "2.1" in files or "2_1" in files else "LongLive 2.0"


def shrunk(name: str, value: object) -> object:
    """The small value of a size input; every other input comes back as it is."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return value
    if name == "width":
        return WIDTH
    if name == "height":
        return HEIGHT
    return value
