"""Times every attention row this machine can run, at LongLive 2.0's full window, each beside its error.

    python tests/bench/attention.py                       1 x 24 heads x 7040 queries x 28160 keys x 128, bfloat16
    python tests/bench/attention.py --keys 7040 14080 21120 28160
    python tests/bench/attention.py --tiny                seconds on a CPU; proves that the script works

Needs torch and this checkout, no ComfyUI. The error of a row is measured against float32 arithmetic in the same run, over all
of its output; a row that is wrong fails the run and gets no time. Rows are timed in turns, so that a clock or a temperature
that drifts meets all of them alike, and each for at least --seconds in all. A time includes bringing the output into the
(B, N, heads * head_dim) layout that the model goes on with, and no compilation.
"""

import argparse
import json
import platform
import shlex
import subprocess
import sys
import time
import types
from dataclasses import replace
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
# The package without its ComfyUI entry point, which a machine with torch alone could not import.
package = types.ModuleType("longlive")
package.__path__ = [str(ROOT)]
sys.modules.setdefault("longlive", package)

from longlive.kernels.arch import arch_name, arch_of  # noqa: E402 - needs the package above
from longlive.kernels.attention import reference  # noqa: E402
from longlive.kernels.dispatch import OPS, Impl, Problem, explain, names, select  # noqa: E402

# Relative L2 error that is rounding: bfloat16 output alone gives 1.7e-3, probabilities rounded as well about 3e-3.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 6e-3}
ROUNDS = 5


def main() -> int:
    options = parse()
    device = torch.device(options.device)
    dtype = getattr(torch, options.dtype)
    arch = arch_of(device)
    print(f"device: {describe_device(device)} ({arch_name(arch)})")
    print(f"torch: {torch.__version__}, cuda {torch.version.cuda}, cudnn {torch.backends.cudnn.version()}, python {platform.python_version()}")
    print(f"command: {shlex.join(['python', *sys.argv])}")
    results, wrong = [], 0
    for keys in options.keys:
        problem = Problem(options.queries, keys, options.heads, options.head_dim, dtype, device.type, batch=options.batch)
        found = bench(problem, device, arch, options)
        wrong += sum(not row["correct"] for row in found)
        results += found
    if options.json:
        options.json.write_text(json.dumps({"device": describe_device(device), "torch": torch.__version__, "rows": results}, indent=1))
    return 1 if wrong else 0


def bench(problem: Problem, device: torch.device, arch: int | str, options: argparse.Namespace) -> list[dict]:
    """Check, then time every row for one problem; prints a line each."""
    print(f"\n{problem}: {problem.flops / 1e12:.3g} TFLOP; auto takes {select('attention', problem, arch).name}")
    q, k, v = random_inputs(problem, device)
    truth = reference.attention(q.float(), k.float(), v.float(), problem=replace(problem, dtype=torch.float32))
    results, running = [], {}
    for name, reason in explain("attention", problem, arch).items():
        if options.rows and name not in options.rows:
            continue
        if reason is not None:
            print(f"{name:14s} not here: {reason}")
            continue
        row = {"problem": str(problem), "row": name, **check(row_named(name), (q, k, v), truth, problem)}
        results.append(row)
        if not row["correct"]:
            print(f"{name:14s} WRONG: {row['problem_found']}")
        elif name != "reference" or options.time_reference:
            running[name] = row
        else:
            print(f"{name:14s} rel L2 {row['error']:.1e}, not timed (--time-reference)")
    del truth
    for name, ms in time_in_turns({name: call_of(name, (q, k, v), problem) for name in running}, device, options.seconds).items():
        row = running[name]
        row.update(ms=ms, tflops=problem.flops / ms / 1e9)
        print(f"{name:14s} {ms:9.3f} ms {row['tflops']:8.1f} TFLOP/s   rel L2 {row['error']:.1e}, worst {row['worst']:.1e} of the largest")
    if device.type == "cuda":
        print(f"{'':14s} {gpu_state(device)}")
    return results


def random_inputs(problem: Problem, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gaussian q, k, v as (B, N, heads, head_dim)."""
    generator = torch.Generator(device).manual_seed(0)

    def draw(length: int) -> torch.Tensor:
        shape = (problem.batch, length, problem.heads, problem.head_dim)
        return torch.randn(shape, generator=generator, device=device).to(problem.dtype)

    return draw(problem.q_len), draw(problem.k_len), draw(problem.k_len)


def row_named(name: str) -> Impl:
    return next(impl for impl in OPS["attention"] if impl.name == name)


def check(impl: Impl, inputs: tuple, truth: torch.Tensor, problem: Problem) -> dict:
    """The row's error against float32; whatever it raises counts as wrong."""
    try:
        out = impl.load()(*inputs, problem=problem)
    except Exception as error:  # a row that cannot run is a result, and the others still get theirs
        return {"correct": False, "problem_found": f"{type(error).__name__}: {error}"}
    difference = out.float() - truth
    error = (difference.norm() / truth.norm()).item()
    worst = (difference.abs().max() / truth.abs().max()).item()
    tolerance = TOLERANCE[problem.dtype]
    correct = out.shape == truth.shape and error <= tolerance  # a NaN compares as wrong
    return {"correct": correct, "error": error, "worst": worst, "problem_found": "" if correct else f"rel L2 {error:.1e} > {tolerance}"}


def call_of(name: str, inputs: tuple, problem: Problem):
    function = row_named(name).load()
    return lambda: function(*inputs, problem=problem).flatten(2)


def time_in_turns(calls: dict, device: torch.device, seconds: float) -> dict[str, float]:
    """Median over rounds of the mean time of a call, in ms."""
    repeats = {name: max(1, round(seconds / ROUNDS * 1000 / max(timed(call, device, 2), 1e-6))) for name, call in calls.items()}
    found = {name: [] for name in calls}
    for _ in range(ROUNDS):
        for name, call in calls.items():
            found[name].append(timed(call, device, repeats[name]))
    return {name: sorted(times)[ROUNDS // 2] for name, times in found.items()}


def timed(call, device: torch.device, repeats: int) -> float:
    """Mean ms of `repeats` calls in a row, after one that is not counted."""
    call()
    if device.type != "cuda":
        start = time.perf_counter()
        for _ in range(repeats):
            call()
        return (time.perf_counter() - start) * 1000 / repeats
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(repeats):
        call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / repeats


def describe_device(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"{device.type}, {torch.get_num_threads()} threads"


def gpu_state(device: torch.device) -> str:
    """SM clock, power and temperature as the driver gives them right after the run."""
    query = ["nvidia-smi", f"--id={device.index or 0}", "--query-gpu=clocks.sm,power.draw,temperature.gpu", "--format=csv,noheader"]
    try:
        return "right after: " + subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError) as error:
        return f"clock and power unknown: {error}"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="bfloat16", choices=[str(dtype).removeprefix("torch.") for dtype in TOLERANCE])
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--heads", type=int, default=24)
    parser.add_argument("--queries", type=int, default=7040, help="tokens of a chunk")
    parser.add_argument("--keys", type=int, nargs="+", default=[28160], help="tokens of the window; several are timed one after the other")
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--rows", nargs="+", choices=names("attention"), help="only these rows")
    parser.add_argument("--seconds", type=float, default=2.0, help="time spent on each row")
    parser.add_argument("--time-reference", action="store_true", help="time the slow reference row as well")
    parser.add_argument("--json", type=Path, help="also write the numbers here")
    parser.add_argument("--tiny", action="store_true", help="a small float32 problem that a CPU does in seconds")
    options = parser.parse_args()
    if options.tiny:
        options.dtype, options.heads, options.queries, options.keys, options.head_dim = "float32", 2, 48, [48, 113], 64
        options.seconds, options.time_reference = 0.1, True
    return options


if __name__ == "__main__":
    sys.exit(main())
