"""Whether the ComfyUI that imports this package is new enough. Imports nothing of ComfyUI but its version file."""

import re
import sys

MINIMUM_COMFYUI = (0, 30, 0)


def require_comfyui() -> None:
    """Raise ImportError, one line long, when the ComfyUI around us is older than ``MINIMUM_COMFYUI``.

    Outside ComfyUI (a script or a test that only wants ``accel``) there is nothing to check.
    """
    try:
        from comfyui_version import __version__ as found
    except ImportError:
        # Only very old versions have no version file; folder_paths is loaded before any custom node.
        if "folder_paths" not in sys.modules:
            return
        found = "of a version without a version number"
    if _parse(found) < MINIMUM_COMFYUI:
        needed = ".".join(str(part) for part in MINIMUM_COMFYUI)
        raise ImportError(f"LongLive Stream needs ComfyUI {needed} or newer, and this ComfyUI is {found}: please update ComfyUI")


def _parse(version: str) -> tuple[int, int, int]:
    """Read the leading numbers: "0.38.1rc2" is (0, 38, 1), text without numbers is (0, 0, 0)."""
    numbers = [int(part) for part in re.match(r"[\d.]*", version.lstrip("v")).group().split(".") if part][:3]
    return tuple(numbers + [0] * (3 - len(numbers)))
