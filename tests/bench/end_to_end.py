"""Sampling plus decoding to uint8 frames on the host, one after the other on one GPU: full-size 5B and Wan 2.2 VAE, random weights, BF16, 1280x704.

    python tests/bench/end_to_end.py --comfy PATH
    python tests/bench/end_to_end.py --comfy PATH --attention flash-attn-4
    python tests/bench/end_to_end.py --comfy PATH --tiny          seconds on a CPU; proves that the script works

Wall-clock time of whole chunks at a full window, from noise to frames in pinned host memory; text encoding and the video encoder are outside. Beside it the
errors of the same run: the flow at a full window and the first decoded frames, each against float32 with the same weights.
"""

from __future__ import annotations

import argparse
import json
import platform
import shlex
import statistics
import sys
import time
from pathlib import Path

import decode
import sampling
import torch
from longlive.accel.noise import ChunkNoise
from longlive.accel.sampler import ChunkPlan
from longlive.accel.stream_decode import StreamDecoder22


@torch.inference_mode()
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--comfy", type=Path, required=True, help="folder of a ComfyUI (its Python files)")
    parser.add_argument("--attention", default="auto", help="row of the attention table")
    parser.add_argument("--variant", default="fast", choices=list(decode.VARIANTS), help="how the decoder runs; fast is what the node does on a GPU")
    parser.add_argument("--chunks", type=int, default=8)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--tiny", action="store_true", help="a two-layer model on the CPU")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    command = shlex.join(["python", *sys.argv])
    options.size, options.device = ("tiny", "cpu") if options.tiny else ("5b", "cuda")
    options.rows, options.columns = (4, 6) if options.tiny else (44, 80)
    options.dtype = torch.float32 if options.tiny else torch.bfloat16
    cuda = options.device == "cuda"
    device = torch.cuda.get_device_name() if cuda else platform.processor() or "CPU"
    print(f"device: {device}; torch {torch.__version__}; python {platform.python_version()}\ncommand: {command}")

    dit = sampling.build(options, options.dtype)
    vae = decode.build(decode.core_vae(options.comfy.resolve(), not cuda), options)
    variant, _ = decode.VARIANTS[options.variant]
    context = torch.randn(1, 300, 4096, generator=torch.Generator(options.device).manual_seed(1), device=options.device).to(options.dtype)
    network = sampling.Network(dit, context, sampling.attention_by(options.attention))
    noise = ChunkNoise(0, (1, 48, 8, options.rows, options.columns))
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    loop, decoder, plan = sampling.new_loop(network, options, options.dtype), StreamDecoder22(vae, variant), ChunkPlan("p")
    rows, frames = [], 0
    for chunk in range(options.chunks):
        begin = time.perf_counter()
        latents = loop.run(plan, noise)
        if cuda:
            torch.cuda.synchronize()
        middle = time.perf_counter()
        hosts = [decode.to_host(step) for step in decoder.steps(latents.to(options.dtype))]
        if cuda:
            torch.cuda.synchronize()
        end = time.perf_counter()
        frames = sum(host.shape[0] for host in hosts)
        rows.append({"chunk": chunk, "sample_ms": 1000 * (middle - begin), "decode_ms": 1000 * (end - middle), "frames": frames})
    peak = torch.cuda.max_memory_allocated() / 1e9 if cuda else float("nan")
    full = [row for row in rows if row["chunk"] >= 4] or rows[-1:]
    sample, decoded = (statistics.median(row[name] for row in full) for name in ("sample_ms", "decode_ms"))

    z = loop.video.latents[0][:, :, :4].to(options.device, options.dtype)
    one_shot = vae.decode(z)
    truth = vae.float().decode(z.float()).cpu()
    vae.to(options.dtype)
    streamed = decode.error_of(vae, variant, z, one_shot.cpu(), truth)
    vae.to("cpu")
    flow_error = sampling._error(options, dit, context, noise, sampling._one_forward(loop, noise), loop.video.latents)
    if not (flow_error < 0.1 and streamed["error_to_float32"] < 0.1):
        print(f"flow off by {flow_error:.3g}, frames by {streamed['error_to_float32']:.3g}: no times are printed for a wrong result")
        return 1
    print(f"errors against float32: flow at a full window {flow_error:.2e}, decoded frames {streamed['error_to_float32']:.2e} (relative L2, random weights)")
    for row in rows:
        print(f"chunk {row['chunk']}: sampling {row['sample_ms']:.0f} ms, decoding {row['decode_ms']:.0f} ms, {row['frames']} frames")
    fps = 1000 * frames / (sample + decoded)
    print(f"full window: sampling {sample:.0f} ms + decoding {decoded:.0f} ms for {frames} frames = {fps:.1f} fps; peak {peak:.2f} GB with everything resident")
    if options.json:
        options.json.write_text(json.dumps({"device": device, "command": command, "rows": rows, "fps": fps, "flow_error": flow_error, **streamed}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
