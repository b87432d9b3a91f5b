"""A 5B run in-process through core's patcher with a LoRA on, on a GPU whose free memory is capped, with and without dynamic VRAM.

    COMFYUI_PATH=… python tests/bench/capped.py --caps 12 16 24 --modes legacy dynamic
    COMFYUI_PATH=… python tests/bench/capped.py --caps 0 --modes legacy --chunks 6     no cap: the plain end-to-end figures

Each case runs in a child process: ballast takes the card's memory down to the cap (GB = 10^9 bytes), a random BF16 5B file is loaded by Load LongLive DiT's
code, a rank-128 LoRA on all 300 block linears is put on by core, Attention Accelerator is set to auto, and the Chunked Sampler's code samples 1280x704. It
completes, or refuses with the GB missing; both are results. ``--tiny`` proves the script on a CPU. Needs 11 GB of disk for the time of the run.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from stand_in import StandIn

TESTS = Path(__file__).resolve().parent.parent
TINY_LAYERS = 2


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--caps", type=float, nargs="+", default=[12, 16, 24], help="free GPU memory in GB; 0 is no cap")
    parser.add_argument("--modes", nargs="+", choices=["legacy", "dynamic"], default=["legacy", "dynamic"])
    parser.add_argument("--chunks", type=int, default=5)
    parser.add_argument("--no-lora", action="store_true")
    parser.add_argument("--tiny", action="store_true", help="a two-layer model on the CPU")
    parser.add_argument("--child", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print("RESULT " + json.dumps(run(**options.child)))
        return 0
    print(f"python {platform.python_version()}; command: {shlex.join(['python', *sys.argv])}")
    with tempfile.TemporaryDirectory() as folder:
        model, lora = make_files(Path(folder), TINY_LAYERS if options.tiny else 30)
        for mode in options.modes:
            for cap in options.caps:
                job = {
                    "model": str(model),
                    "lora": None if options.no_lora else str(lora),
                    "cap": cap,
                    "dynamic": mode == "dynamic",
                    "chunks": options.chunks,
                    "tiny": options.tiny,
                }
                done = subprocess.run([sys.executable, __file__, "--child", json.dumps(job)], capture_output=True, text=True)
                found = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
                label = f"cap {cap:g} GB, {mode}{'' if options.no_lora else ', LoRA'}"
                if not found:
                    print(f"{label}: crashed ({done.returncode}): {(done.stderr or done.stdout)[-1500:]}", flush=True)
                    continue
                print(f"{label}: {json.loads(found[-1][7:])['text']}", flush=True)
    return 0


def make_files(folder: Path, layers: int) -> tuple[Path, Path]:
    """A random BF16 DiT of the 5B widths under upstream's names, and a core-named rank-128 LoRA; both from one pool of random numbers, for speed."""
    _register()
    import torch
    from longlive.accel.checkpoint import DitShape
    from longlive.accel.weight_file import write_safetensors

    pool = torch.randn(1 << 24, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)

    def values(shape: tuple[int, ...], scale: float) -> torch.Tensor:
        count = 1
        for size in shape:
            count *= size
        return (pool.repeat(-(-count // pool.numel()))[:count] * scale).reshape(shape)

    shapes = DitShape(3072, 14336, layers, 48, 48).tensors()
    model = folder / "LongLive-2.0-5B-random.safetensors"
    specs = {name: (shape, torch.bfloat16) for name, shape in shapes.items()}
    ones = {name for name in shapes if "norm" in name and name.endswith("weight")}
    weights = ((name, torch.ones(shape, dtype=torch.bfloat16) if name in ones else values(shape, 0.018)) for name, shape in shapes.items())
    write_safetensors(model, specs, weights, {})
    linears = [name for name, shape in shapes.items() if name.startswith("blocks.") and name.endswith(".weight") and len(shape) == 2]
    pairs: dict[str, tuple[int, ...]] = {}
    for name in linears:
        rows, columns = shapes[name]
        layer = f"diffusion_model.{name.removesuffix('.weight')}"
        pairs |= {f"{layer}.lora_A.weight": (128, columns), f"{layer}.lora_B.weight": (rows, 128)}
    lora = folder / "lora.safetensors"
    write_safetensors(lora, {name: (shape, torch.bfloat16) for name, shape in pairs.items()}, ((n, values(s, 0.01)) for n, s in pairs.items()), {})
    return model, lora


def _register() -> None:
    """The package without its ComfyUI entry point."""
    import types

    package = types.ModuleType("longlive")
    package.__path__ = [str(TESTS.parent)]
    sys.modules.setdefault("longlive", package)


def run(model: str, lora: str | None, cap: float, dynamic: bool, chunks: int, tiny: bool) -> dict:
    """One case; returns its text."""
    sys.argv = sys.argv[:1]
    sys.path[:] = [entry for entry in sys.path if Path(entry or os.getcwd()).resolve() not in (TESTS.parent, TESTS / "bench")]
    sys.path.insert(0, os.environ["COMFYUI_PATH"])
    _register()
    from comfy.cli_args import args

    args.cpu = tiny
    import torch

    sys.meta_path.append(StandIn("av"))  # core's node API imports it; sampling never calls it
    if dynamic:
        import comfy_aimdo.control

        comfy_aimdo.control.init()
    import comfy.memory_management
    import comfy.model_management
    import comfy.model_patcher
    import comfy.sd
    import comfy.utils

    if dynamic:
        if not comfy_aimdo.control.init_devices(((0, 0),)):
            return {"text": "dynamic VRAM could not be started here"}
        comfy.model_patcher.CoreModelPatcher = comfy.model_patcher.ModelPatcherDynamic
        comfy.memory_management.aimdo_enabled = True
    from longlive.accel.plan import AttentionRequest
    from longlive.nodes.accelerate import accelerate
    from longlive.nodes.loader import load_longlive
    from longlive.nodes.sampling import sample_video
    from longlive.nodes.sampling_job import SamplingRequest, recipe_of

    ballast = []
    cuda = torch.cuda.is_available() and not tiny
    if cuda and cap:
        torch.zeros(1, device="cuda")
        spare = torch.cuda.mem_get_info()[0] - int(cap * 1e9)
        ballast = [torch.empty(spare, dtype=torch.uint8, device="cuda")]
    free = torch.cuda.mem_get_info()[0] / 1e9 if cuda else 0.0
    held = torch.cuda.memory_allocated() if cuda else 0
    with torch.inference_mode():
        begin = time.perf_counter()
        patcher, _ = load_longlive(model, weight_dtype=torch.bfloat16)
        if lora is not None:
            patcher, _ = comfy.sd.load_lora_for_models(patcher, None, comfy.utils.load_torch_file(lora), 1.0, 0.0)
        patcher, _ = accelerate(patcher, AttentionRequest("auto"))
        loaded = time.perf_counter() - begin
        rows, columns = (4, 6) if tiny else (44, 80)
        context = torch.randn(1, 300, 4096, generator=torch.Generator().manual_seed(1))
        latent = {"samples": torch.zeros(1, 48, 8 * chunks, rows, columns)}
        recipe = recipe_of(patcher)
        marks: list[float] = []
        if cuda:
            torch.cuda.reset_peak_memory_stats()

        import latent_preview

        # The progress callback is the only clock that the sampler offers; it fires after every forward.
        made = latent_preview.prepare_callback

        def clocked(*arguments: object, **named: object) -> object:
            inner = made(*arguments, **named)

            def callback(*values: object) -> None:
                if cuda:
                    torch.cuda.synchronize()
                marks.append(time.perf_counter())
                inner(*values)

            return callback

        latent_preview.prepare_callback = clocked
        begin = time.perf_counter()
        try:
            result = sample_video(patcher, [[context, {}]], None, latent, SamplingRequest(recipe, park="none"))
        except torch.OutOfMemoryError as error:
            return {"text": f"{free:.1f} GB free; refused: {error}"}
        wall = time.perf_counter() - begin
    finite = bool(torch.isfinite(result.latent["samples"]).all())
    forwards = recipe.steps + 1
    ends = marks[forwards - 1 :: forwards]
    last = (ends[-1] - ends[-2]) if len(ends) > 1 else wall
    peak = (torch.cuda.max_memory_allocated() - held) / 1e9 if cuda else float("nan")
    attention = result.report["attention"]["effective"]
    text = (
        f"{free:.1f} GB free; completed {chunks} chunks in {wall:.1f} s (load {loaded:.1f} s), last chunk {1000 * last:.0f} ms = "
        f"{1000 * last / forwards:.0f} ms a forward, torch peak {peak:.2f} GB, attention {attention}, latents {'finite' if finite else 'NOT FINITE'}"
    )
    del ballast
    return {"text": text}


if __name__ == "__main__":
    sys.exit(main())
