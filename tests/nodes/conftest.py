"""The tests in this folder run nodes inside an in-process ComfyUI, so they need one."""

import sys

import pytest

if "comfy.cli_args" not in sys.modules:
    raise pytest.UsageError("tests/nodes needs a ComfyUI: set COMFYUI_PATH to one, or let `python run.py test` find or install it")
