"""Registers the checkout as the package ``longlive`` and prepares an in-process ComfyUI, once, on import.

conftest.py does it for the tests; parity.py and freeze_cases.py also run where there is no pytest. ComfyUI comes from COMFYUI_PATH, else from the one that
``python run.py test`` installed into this checkout.
"""

import importlib.util
import os
import shutil
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def _register_package() -> None:
    """Make the checkout importable as ``longlive``, whatever its folder is called."""
    # Our nodes/ would hide ComfyUI's nodes.py if the checkout itself were importable (python -m pytest puts the current folder first).
    sys.path[:] = [entry for entry in sys.path if Path(entry or os.getcwd()).resolve() != ROOT]
    spec = importlib.util.spec_from_file_location("longlive", ROOT / "__init__.py", submodule_search_locations=[str(ROOT)])
    module = importlib.util.module_from_spec(spec)
    sys.modules["longlive"] = module
    spec.loader.exec_module(module)


def find_comfyui() -> Path | None:
    """The folder of the ComfyUI to run against, or None."""
    comfyui = Path(os.environ.get("COMFYUI_PATH") or ROOT / ".comfy" / "ComfyUI").resolve()
    return comfyui if (comfyui / "comfy" / "cli_args.py").is_file() else None


def _prepare_comfyui() -> tuple[Path | None, Path | None]:
    """Put ComfyUI first on sys.path, on the CPU, with a base directory of its own; return (its folder, the base directory)."""
    comfyui = find_comfyui()
    if comfyui is None:
        return None, None
    sys.path.insert(0, str(comfyui))
    base = Path(tempfile.mkdtemp(prefix="longlive-tests-"))
    from comfy.cli_args import args

    args.cpu = True
    args.base_directory = str(base)
    args.disable_api_nodes = True
    return comfyui, base


def clean_up() -> None:
    """Delete the base directory."""
    if BASE_DIRECTORY is not None:
        shutil.rmtree(BASE_DIRECTORY, ignore_errors=True)


COMFYUI, BASE_DIRECTORY = _prepare_comfyui()
_register_package()
