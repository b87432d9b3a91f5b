"""tests/bench/attention.py runs on a machine with torch alone, and does not time what is wrong."""

import json
import os
import subprocess
import sys

import pytest


def run(checkout, *arguments, code: str = ""):
    environment = {name: value for name, value in os.environ.items() if name != "COMFYUI_PATH"} | {"OMP_NUM_THREADS": "1"}
    script = str(checkout / "tests" / "bench" / "attention.py")
    command = [sys.executable, "-c", f"import sys, runpy; sys.argv = {[script, *arguments]!r}\n{code}\nrunpy.run_path({script!r}, run_name='__main__')"]
    return subprocess.run(command, capture_output=True, text=True, env=environment, cwd=checkout.parent)


def test_tiny_on_a_cpu(checkout, tmp_path):
    done = run(checkout, "--tiny", "--device", "cpu", "--json", str(tmp_path / "out.json"))
    assert done.returncode == 0, done.stderr
    assert "cudnn          not here: runs on sm_80" in done.stdout
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert [row["row"] for row in rows] == ["torch", "reference"] * 2
    assert all(row["ms"] > 0 and row["tflops"] > 0 and row["error"] < 1e-5 for row in rows)


@pytest.mark.parametrize("factor", ["1.001", "float('nan')"])
def test_a_wrong_row_fails_and_gets_no_time(checkout, tmp_path, factor):
    code = (
        "import torch\n"
        "sdpa = torch.nn.functional.scaled_dot_product_attention\n"
        f"torch.nn.functional.scaled_dot_product_attention = lambda *a, **k: sdpa(*a, **k) * {factor}\n"
    )
    done = run(checkout, "--tiny", "--device", "cpu", "--json", str(tmp_path / "out.json"), code=code)
    assert done.returncode == 1 and "torch          WRONG: rel L2" in done.stdout
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert [("ms" in row) for row in rows if row["row"] == "torch"] == [False, False]
