"""Turns a shipped workflow into one that any CPU runs in seconds: the three loaders become stand-ins and the size shrinks; nothing else changes.

The real text encoder and VAE cannot be shrunk, which is why they are replaced at all.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping

# Loader in the shipped workflow: its stand-in.
STAND_INS = {
    "LongLiveLoadDiT": "LongLiveStandInDiT",
    "UNETLoader": "LongLiveStandInDiT",
    "CLIPLoader": "LongLiveStandInCLIP",
    "VAELoader": "LongLiveStandInVAE",
}
LATENT_NODES = ("LongLiveEmptyLatent", "Wan22ImageToVideoLatent")
# Pixels; on the grid of both releases (32 for LongLive 2.0, 16 for 1.0).
WIDTH, HEIGHT = 64, 32


def with_stand_ins(workflow: Mapping[str, dict], new_width: int = WIDTH, new_height: int = HEIGHT) -> dict[str, dict]:
    """Return a copy of an API workflow with stand-in loaders and a small size. Node ids, links and every other value stay."""
    small = copy.deepcopy(dict(workflow))
    release = release_of(workflow)
    width, height = video_size(workflow)
    for node in small.values():
        inputs, stand_in = node["inputs"], STAND_INS.get(node["class_type"])
        if stand_in is not None:
            node["class_type"] = stand_in
            node["inputs"] = {"seed": 0} if stand_in == "LongLiveStandInCLIP" else {"model": release, "seed": 0}
            continue
        # Start images are put together from pieces, so places shrink with sizes.
        for names, factor in ((("width", "x"), new_width / width), (("height", "y"), new_height / height)):
            for name in names:
                if isinstance(inputs.get(name), int):
                    inputs[name] = round(inputs[name] * factor)
    return small


def release_of(workflow: Mapping[str, dict]) -> str:
    """Which release a workflow is for, from the VAE file it names."""
    files = " ".join(str(node["inputs"].get("vae_name", "")) for node in workflow.values()).lower()
    return "LongLive 1.0" if "2.1" in files or "2_1" in files else "LongLive 2.0"


def video_size(workflow: Mapping[str, dict]) -> tuple[int, int]:
    """Width and height of the video in pixels, from the node that makes its latents."""
    for node in workflow.values():
        if node["class_type"] in LATENT_NODES:
            return node["inputs"]["width"], node["inputs"]["height"]
    raise ValueError(f"none of {', '.join(LATENT_NODES)} is in the workflow; one of them sets the size of the video")
