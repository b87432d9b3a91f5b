"""Times the chunk loop on a full-size LongLive 2.0 (5B, random weights), each figure beside its error, and its peak memory.

    python tests/bench/sampling.py --comfy PATH                   1280x704, BF16: forwards at chunk 0 .. 5, peak memory
    python tests/bench/sampling.py --comfy PATH --attention flash-attn-4
    python tests/bench/sampling.py --comfy PATH --tiny            seconds on a CPU; proves that the script works

Needs torch, this checkout and ComfyUI's Python files (its ``comfy`` folder; no server). Times are medians of CUDA events after a warm-up chunk; the error is
the relative L2 distance of the flow at a full window from the same forward in float32 (weights, activations, keys and values), fed the same latents.
"""

from __future__ import annotations

import argparse
import json
import platform
import shlex
import statistics
import sys
import time
import types
from dataclasses import replace
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
# The package without its ComfyUI entry point, which a machine without a full ComfyUI could not import.
package = types.ModuleType("longlive")
package.__path__ = [str(ROOT)]
sys.modules.setdefault("longlive", package)

from longlive.accel.forward import chunk_forward  # noqa: E402 - needs the package above
from longlive.accel.kv_cache import CacheShape, KVCache  # noqa: E402
from longlive.accel.noise import ChunkNoise  # noqa: E402
from longlive.accel.presets import LONGLIVE_2  # noqa: E402
from longlive.accel.sampler import ChunkLoop, ChunkPlan, LoopOptions, Video  # noqa: E402
from longlive.accel.window import Window  # noqa: E402
from longlive.kernels.arch import arch_of  # noqa: E402
from longlive.kernels.attention import problem_of  # noqa: E402
from longlive.kernels.dispatch import select  # noqa: E402

SIZES = {"5b": dict(dim=3072, ffn_dim=14336, num_heads=24, num_layers=30), "tiny": dict(dim=256, ffn_dim=512, num_heads=2, num_layers=2)}


def build(options: argparse.Namespace, dtype: torch.dtype) -> torch.nn.Module:
    """Core's WanModel with random weights of a trained model's size, from a seed."""
    sys.path.insert(0, str(options.comfy))
    sys.argv = sys.argv[:1]
    from comfy.cli_args import args

    args.cpu = options.device == "cpu"
    import comfy.ops
    from comfy.ldm.wan.model import WanModel

    with torch.device(options.device):
        dit = WanModel(
            model_type="t2v", in_dim=48, out_dim=48, **SIZES[options.size], device=options.device, dtype=dtype, operations=comfy.ops.disable_weight_init
        )
    generator = torch.Generator(options.device).manual_seed(0)
    with torch.no_grad():
        for name, parameter in dit.named_parameters():
            if "norm" in name and name.endswith("weight"):
                parameter.fill_(1)
            else:
                scale = parameter.shape[-1] ** -0.5 if parameter.ndim > 1 else 0.02
                parameter.copy_(torch.randn(parameter.shape, generator=generator, device=options.device, dtype=torch.float32) * min(scale, 0.5))
    return dit.eval()


class Network:
    """The chunk loop's network without a host, timing every call."""

    def __init__(self, dit: torch.nn.Module, context: torch.Tensor, attention: object) -> None:
        self.dit, self.context, self.attention = dit, context, attention
        self.times: list[tuple[bool, object, object]] = []
        self.cuda = context.is_cuda

    def _mark(self) -> object:
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _run(self, x: torch.Tensor, call: object) -> torch.Tensor | None:
        begin = self._mark()
        dtype = self.context.dtype
        flow = chunk_forward(self.dit, x.to(dtype), self.context, call, branches=(0,), prompts=("p",), attention=self.attention, transformer_options={})
        self.times.append((call.commit, begin, self._mark()))
        return flow if flow is None else flow.float()

    def flow(self, x: torch.Tensor, sigma: float, call: object, prompt: object) -> torch.Tensor:
        return self._run(x, call)

    def commit(self, x: torch.Tensor, call: object, prompt: object) -> None:
        self._run(x, call)

    def milliseconds(self) -> list[tuple[bool, float]]:
        if self.cuda:
            torch.cuda.synchronize()
            return [(commit, begin.elapsed_time(end)) for commit, begin, end in self.times]
        return [(commit, 1000 * (end - begin)) for commit, begin, end in self.times]


def attention_by(name: str) -> object:
    """The host's calling convention over one row of our table."""
    chosen: dict = {}

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, heads: int, transformer_options: dict | None = None) -> torch.Tensor:
        q, k, v = (t.unflatten(2, (heads, -1)) for t in (q, k, v))
        problem = problem_of(q, k, v)
        if problem not in chosen:
            chosen[problem] = select("attention", problem, arch_of(q.device), name).load()
        return chosen[problem](q, k, v, problem=problem).flatten(2)

    return run


def new_loop(network: Network, options: argparse.Namespace, dtype: torch.dtype) -> ChunkLoop:
    recipe = replace(LONGLIVE_2, steps=options.steps)
    size = SIZES[options.size]
    tokens = options.rows * options.columns // 4
    cache = KVCache(CacheShape(size["num_layers"], 1, recipe.window_frames, tokens, size["dim"], dtype), torch.device(options.device))
    video = Video(Window(recipe.window_frames, recipe.sink_frames, recipe.shot_pin))
    return ChunkLoop(network, recipe, LoopOptions(), video, {0: cache}, torch.device(options.device))


@torch.inference_mode()
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--comfy", type=Path, required=True, help="folder of a ComfyUI (its Python files)")
    parser.add_argument("--attention", default="auto", help="row of the attention table")
    parser.add_argument("--chunks", type=int, default=8)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--tiny", action="store_true", help="a two-layer model on the CPU")
    parser.add_argument("--no-error", action="store_true", help="only together with an earlier run's error: skips the float32 forward")
    parser.add_argument("--profile", type=Path, help="write a table of kernel times of one full-window forward")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    command = shlex.join(["python", *sys.argv])
    options.size, options.device = ("tiny", "cpu") if options.tiny else ("5b", "cuda")
    options.rows, options.columns = (4, 6) if options.tiny else (44, 80)
    dtype = torch.bfloat16
    cuda = options.device == "cuda"
    name = torch.cuda.get_device_name() if cuda else platform.processor() or "CPU"
    print(f"device: {name}; torch {torch.__version__}; python {platform.python_version()}\ncommand: {command}")

    dit = build(options, dtype)
    context = torch.randn(1, 300, 4096, generator=torch.Generator(options.device).manual_seed(1), device=options.device).to(dtype)
    noise = ChunkNoise(0, (1, 48, 8, options.rows, options.columns))
    network = Network(dit, context, attention_by(options.attention))
    weights = torch.cuda.memory_allocated() if cuda else 0
    plan = ChunkPlan("p")
    new_loop(network, options, dtype).run(plan, noise)  # warm-up: kernels are chosen and compiled here
    network.times.clear()
    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    loop = new_loop(network, options, dtype)
    wall = time.perf_counter()
    for _ in range(options.chunks):
        loop.run(plan, noise)
    times = network.milliseconds()
    wall = time.perf_counter() - wall
    forwards = options.steps + 1
    rows = []
    for chunk in range(options.chunks):
        part = times[chunk * forwards : (chunk + 1) * forwards]
        steps = [ms for commit, ms in part if not commit]
        rows.append({"chunk": chunk, "forward_ms": statistics.median(steps), "clean_ms": part[-1][1], "chunk_ms": sum(ms for _, ms in part)})
    peak = torch.cuda.max_memory_allocated() / 1e9 if cuda else float("nan")

    # The float32 replay runs every chunk again, so the error is taken on a video of eight chunks, however long the timed one is.
    short = loop
    if options.chunks > 8:
        short = new_loop(network, options, dtype)
        for _ in range(8):
            short.run(plan, noise)
    flow, latents = _one_forward(short, noise), short.video.latents
    error = float("nan")
    if options.profile is not None:
        from torch.profiler import ProfilerActivity, profile

        with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]) as prof:
            _one_forward(loop, noise)
        options.profile.write_text(prof.key_averages().table(sort_by="cuda_time_total" if cuda else "cpu_time_total", row_limit=40))
    if not options.no_error:
        error = _error(options, dit, context, noise, flow, latents)
        if not error < 0.1:
            print(f"the flow is off by {error:.3g}: no times are printed for a wrong result")
            return 1
    full = [row for row in rows if row["chunk"] >= 3]
    print(f"flow at a full window against float32: relative L2 {error:.2e} (random weights, bfloat16)")
    for row in rows:
        print(f"chunk {row['chunk']}: forward {row['forward_ms']:.1f} ms, clean pass {row['clean_ms']:.1f} ms, chunk {row['chunk_ms']:.0f} ms")
    forward = statistics.median(row["forward_ms"] for row in full) if full else float("nan")
    chunk_ms = statistics.median(row["chunk_ms"] for row in full) if full else float("nan")
    print(f"full window: forward {forward:.1f} ms, chunk of 32 frames {chunk_ms:.0f} ms = {32000 / chunk_ms:.1f} fps without decoding")
    if options.chunks >= 50:
        early, late = (statistics.median(row["chunk_ms"] for row in part) for part in (rows[4:24], rows[-20:]))
        print(f"flat: chunks 4 to 23 {early:.1f} ms, chunks {options.chunks - 20} to {options.chunks - 1} {late:.1f} ms ({100 * (late / early - 1):+.1f} %)")
    if cuda:
        print(f"memory: weights {weights / 1e9:.2f} GB, peak {peak:.2f} GB with the window of {loop.caches[0].shape.num_bytes / 1e9:.2f} GB; wall {wall:.1f} s")
    if options.json:
        options.json.write_text(
            json.dumps({"device": name, "command": command, "error": error, "rows": rows, "peak_gb": peak, "forward_ms": forward}, indent=1)
        )
    return 0


def _one_forward(loop: ChunkLoop, noise: ChunkNoise) -> torch.Tensor:
    """The flow of one more chunk at sigma 0.83 over the window as it stands; the window is advanced the first time only."""
    start = loop.video.next_chunk * 8
    if loop.video.num_frames == start:
        loop.video.offsets += [0.0] * 8
    x = noise.initial(loop.video.next_chunk).to(loop.device)
    call = loop._call([833.0] * 8, loop.video.window.enter(start, 8), range(start, start + 8), commit=False)
    return loop.network.flow(x, 0.833, call, "p")


def _error(options: argparse.Namespace, dit: torch.nn.Module, context: torch.Tensor, noise: ChunkNoise, flow: torch.Tensor, latents: list) -> float:
    """Replay the same latents through the same weights in float32 and compare the next forward."""
    torch.backends.cuda.matmul.allow_tf32 = False
    network = Network(dit.float(), context.float(), attention_by("reference"))
    exact = new_loop(network, options, torch.float32)
    for x in latents:
        start = exact.video.num_frames
        exact.video.offsets += [0.0] * 8
        exact._commit(x.to(exact.device), start, "p")
        exact._finish(x)
    expected = _one_forward(exact, noise)
    return ((flow - expected).norm() / expected.norm()).item()


if __name__ == "__main__":
    sys.exit(main())
