"""Times the stream decoder on a full-size Wan 2.2 VAE (random weights): milliseconds a chunk and peak memory, each beside its error.

    python tests/bench/decode.py --comfy PATH                     1280x704, bfloat16, chunks of 8 latents, every variant
    python tests/bench/decode.py --comfy PATH --variants core fast
    python tests/bench/decode.py --comfy PATH --tiny              seconds on a CPU; proves that the script works

Needs torch, einops, psutil, this checkout and ComfyUI's Python files (its ``comfy`` folder, or COMFYUI_PATH; no server). A chunk's time runs from latents on
the GPU to uint8 frames in pinned host memory, encoder excluded; figures are medians of CUDA events after two warm-up chunks. Errors are relative L2 distances
of the frames of the first latents: from core's own one-shot decode in the same dtype, and from one in float32 with the same weights (what core itself differs
by is in the line "one-shot"). Memory is torch's peak, in 10^9 bytes, weights included; "estimate" is what the node asks core to make room for.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import statistics
import sys
import time
import types
from pathlib import Path

import torch
from stand_in import StandIn

ROOT = Path(__file__).resolve().parents[2]
# The package without its ComfyUI entry point, which a machine without a full ComfyUI could not import.
package = types.ModuleType("longlive")
package.__path__ = [str(ROOT)]
sys.modules.setdefault("longlive", package)

from longlive.accel.stream_decode import StreamDecoder22, StreamOptions, decode_memory  # noqa: E402 - needs the package above

# name: (options, weights in channels-last order beforehand, which the node does not do)
VARIANTS = {
    "core": (StreamOptions(walk=False), False),
    "core, weights channels-last": (StreamOptions(walk=False), True),
    "exact": (StreamOptions(), False),
    "channels-last": (StreamOptions(channels_last=True), False),
    "fast": (StreamOptions(channels_last=True, fused_norm=True), False),
    "fast, weights channels-last": (StreamOptions(channels_last=True, fused_norm=True), True),
}


def core_vae(comfy: Path, cpu: bool) -> type[torch.nn.Module]:
    """Core's Wan 2.2 VAE class; exits with the missing package's name where core's files need one more."""
    sys.path.insert(0, str(comfy))
    sys.argv = sys.argv[:1]
    stand_in = StandIn("comfy_aimdo")  # core's memory manager, which decoding does not call
    sys.meta_path.append(stand_in)
    try:
        from comfy.cli_args import args

        args.cpu = cpu
        from comfy.ldm.wan.vae2_2 import WanVAE
    except ModuleNotFoundError as error:
        sys.exit(f"ComfyUI's files in {comfy} need the package {error.name!r}, which is not installed here: {error}")
    if stand_in.used:
        print(f"not installed, stood in for: {', '.join(sorted(stand_in.used))}")
    return WanVAE


def build(cls: type[torch.nn.Module], options: argparse.Namespace) -> torch.nn.Module:
    """The VAE with random weights from a seed; norms near 1 and everything else scaled so that activations stay near 1."""
    widths = {"dim": 8, "dec_dim": 16} if options.tiny else {"dim": 160, "dec_dim": 256}
    with torch.device(options.device):
        model = cls(**widths, z_dim=48, dim_mult=[1, 2, 4, 4], num_res_blocks=2, attn_scales=[], temperal_downsample=[False, True, True])
    generator = torch.Generator(options.device).manual_seed(0)
    for name, parameter in model.named_parameters():
        values = torch.randn(parameter.shape, generator=generator, device=options.device)
        scale = 0.1 if parameter.ndim == 1 else parameter[0].numel() ** -0.5
        parameter.data = 1 + 0.1 * values if name.endswith("gamma") else values * scale
    return model.to(options.dtype).eval().requires_grad_(False)


def mark(cuda: bool) -> object:
    if not cuda:
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def milliseconds(begin: object, end: object, cuda: bool) -> float:
    return begin.elapsed_time(end) if cuda else 1000 * (end - begin)


def to_host(frames: torch.Tensor) -> torch.Tensor:
    """What the node does with the frames of a step: IMAGE's values, bytes, a copy that the GPU does not wait for."""
    pixels = frames.float().add_(1).div_(2).clamp_(0, 1)[0].movedim(0, -1).mul(255).clamp_(0, 255).to(torch.uint8).contiguous()
    if not frames.is_cuda:
        return pixels
    return torch.empty(pixels.shape, dtype=torch.uint8, pin_memory=True).copy_(pixels, non_blocking=True)


def relative(x: torch.Tensor, reference: torch.Tensor) -> float:
    """Relative L2 distance, in double precision."""
    x, reference = x.double(), reference.double()
    return float((x - reference).norm() / reference.norm())


def error_of(model: torch.nn.Module, variant: StreamOptions, z: torch.Tensor, one_shot: torch.Tensor, truth: torch.Tensor) -> dict:
    """The streamed frames beside both references, chunked unevenly."""
    decoder = StreamDecoder22(model, variant)
    frames = torch.cat([*(decoder.push(part).cpu() for part in z.split([2, 1, z.shape[2] - 3], dim=2)), decoder.flush().cpu()], dim=2)
    return {
        "bit_equal_to_one_shot": bool(torch.equal(frames, one_shot)),
        "error_to_one_shot": relative(frames, one_shot),
        "error_to_float32": relative(frames, truth),
    }


def time_of(model: torch.nn.Module, variant: StreamOptions, options: argparse.Namespace, z: torch.Tensor) -> dict:
    """Two warm-up chunks, then ``--chunks`` timed ones."""
    cuda = z.is_cuda
    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    decoder = StreamDecoder22(model, variant)
    times: list[float] = []
    for chunk in range(2 + options.chunks):
        begin = mark(cuda)
        hosts = [to_host(frames) for frames in decoder.steps(z)]
        end = mark(cuda)
        if cuda:
            end.synchronize()
        if chunk >= 2:
            times.append(milliseconds(begin, end, cuda))
    assert len({host.shape for host in hosts}) == 1 and float(hosts[-1].float().std()) > 1, "the decoded frames are constant"
    result = {"ms_per_chunk": round(statistics.median(times), 1), "ms_worst": round(max(times), 1), "chunks": len(times)}
    if cuda:
        result |= {
            "peak_gb": round(torch.cuda.max_memory_allocated() / 1e9, 2),
            "reserved_gb": round(torch.cuda.max_memory_reserved() / 1e9, 2),
        }
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--comfy", type=Path, default=os.environ.get("COMFYUI_PATH"), help="ComfyUI's folder; COMFYUI_PATH if not given")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--width", type=int, default=1280, help="pixels")
    parser.add_argument("--height", type=int, default=704, help="pixels")
    parser.add_argument("--latents", type=int, default=8, help="latents a chunk")
    parser.add_argument("--chunks", type=int, default=5, help="timed chunks")
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=list(VARIANTS))
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--cudnn-benchmark", action="store_true", help="let cuDNN try its algorithms first (core's --fast autotune)")
    parser.add_argument("--json", type=Path, help="also write all figures to this file")
    parser.add_argument("--tiny", action="store_true", help="small widths, 3x2 latents, float32")
    options = parser.parse_args()
    if options.comfy is None:
        parser.error("--comfy PATH is needed: the folder of a ComfyUI (or set COMFYUI_PATH)")
    if options.tiny:
        options.width, options.height, options.dtype, options.chunks = 48, 32, "float32", 1
    options.dtype = getattr(torch, options.dtype)
    command = shlex.join([Path(sys.executable).name, *sys.argv])
    torch.backends.cudnn.benchmark = options.cudnn_benchmark
    cuda = options.device.startswith("cuda")
    device = torch.cuda.get_device_name(options.device) if cuda else platform.processor() or "CPU"
    size = f"{options.width}x{options.height}, {options.latents} latents a chunk"
    print(f"{device}, torch {torch.__version__}, cuDNN {torch.backends.cudnn.version()}, {options.dtype}, {size}\n{command}")

    with torch.inference_mode():
        model = build(core_vae(Path(options.comfy).resolve(), not cuda), options)
        height, width = options.height // 16, options.width // 16
        memory = decode_memory(model, 1, height, width, options.dtype)
        weights = sum(parameter.nbytes for parameter in model.parameters())
        print(f"weights {weights / 1e9:.2f} GB; estimate: history {memory.history_bytes / 1e9:.2f} GB, working set {memory.working_bytes / 1e9:.2f} GB")
        generator = torch.Generator(options.device).manual_seed(1)
        z = torch.randn(1, 48, options.latents, height, width, generator=generator, device=options.device).to(options.dtype)

        one_shot = model.decode(z[:, :, :5]).cpu()
        if cuda:
            # Float32 convolutions without TF32 are the truth that both orders of arithmetic are measured against.
            torch.backends.cudnn.allow_tf32 = False
        truth = model.float().decode(z[:, :, :5].float()).cpu()
        model.to(options.dtype)
        results = {"one-shot": {"error_to_float32": relative(one_shot, truth)}}
        print(f"one-shot: {json.dumps(results['one-shot'])}")
        # Variants that reorder the weights run last and on the same values.
        for name in sorted(options.variants, key=lambda name: VARIANTS[name][1]):
            variant, reorder = VARIANTS[name]
            if reorder:
                for parameter in model.parameters():
                    if parameter.ndim == 5:
                        parameter.data = parameter.data.contiguous(memory_format=torch.channels_last_3d)
                    elif parameter.ndim == 4 and parameter.shape[1] > 1:
                        parameter.data = parameter.data.contiguous(memory_format=torch.channels_last)
            results[name] = {**time_of(model, variant, options, z), **error_of(model, variant, z[:, :, :5], one_shot, truth)}
            print(f"{name}: {json.dumps(results[name])}", flush=True)
    if options.json:
        options.json.write_text(json.dumps({"device": device, "torch": torch.__version__, "command": command, "size": size, "results": results}, indent=1))
    # In half precision another order of summation may move a result by as much as the precision itself does, and no further.
    allowed = 1e-4 if options.dtype == torch.float32 else 3 * results["one-shot"]["error_to_float32"]
    wrong = [name for name in options.variants if not results[name]["error_to_one_shot"] <= allowed]
    if not cuda and "exact" in results and not results["exact"]["bit_equal_to_one_shot"]:
        wrong.append("exact (not bit-equal)")
    if wrong:
        print(f"wrong: {', '.join(wrong)} (allowed {allowed:.1e}); their times do not count")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
