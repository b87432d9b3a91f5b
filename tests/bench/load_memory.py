"""Peak host memory and time of loading a random file of the LongLive 2.0 5B shape (10 GB).

    COMFYUI_PATH=… python tests/bench/load_memory.py                 safetensors, .pt and packed NVFP4
    COMFYUI_PATH=… python tests/bench/load_memory.py --adapter       the same with a rank-128 adapter, too
    COMFYUI_PATH=… python tests/bench/load_memory.py --layers 2      a quick look

Needs 12 GB of RAM and 11 GB of disk in the temp folder: one file at a time, deleted afterwards. Each load runs in a child process,
whose memory is sampled every 20 ms: "own" is what it holds for itself (RssAnon), "with file pages" (VmRSS) adds mapped pages of
the file, which the system takes back when it needs them. Linux only. GB = 10^9 bytes.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

FORMS = ("safetensors", "pt", "packed")
TESTS = Path(__file__).resolve().parent.parent
SAMPLE_SECONDS = 0.02


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--form", nargs="+", choices=FORMS, default=FORMS)
    parser.add_argument("--adapter", action="store_true", help="also load with a rank-128 adapter on all 300 linears")
    parser.add_argument("--weight-dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--layers", type=int, default=30, help="fewer layers for a quick look")
    parser.add_argument("--folder", type=Path, help="where the files go for the time of the run (default: the temp folder)")
    parser.add_argument("--child", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    _bootstrap()
    if options.child:
        print(json.dumps(load(**options.child)))
        return 0
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        for form in options.form:
            path, size = make_dit(Path(folder), form, options.layers)
            adapters = [None, make_adapter(Path(folder), options.layers)] if options.adapter else [None]
            for adapter in adapters:
                # Merged weights have been read; only mapped ones are still in the file after the load.
                for touch in (False,) if adapter else (False, True):
                    job = {"path": str(path), "adapter": adapter and str(adapter), "weight_dtype": options.weight_dtype, "touch": touch}
                    result = _in_child(job)
                    what = f"{form}{' + adapter' if adapter else ''}, {'every weight read once' if touch else 'load only'}"
                    print(
                        f"{what}: file {size / 1e9:.2f} GB, weights {result['weights'] / 1e9:.2f} GB {options.weight_dtype}; "
                        f"peak own {result['own'] / 1e9:.2f} GB, with file pages {result['all'] / 1e9:.2f} GB; {result['seconds']:.1f} s",
                        flush=True,
                    )
            path.unlink()
    return 0


def load(path: str, adapter: str | None, weight_dtype: str, touch: bool) -> dict:
    """Load one file; with ``touch``, read every weight once afterwards, as the first forward would."""
    import torch
    from longlive.nodes.loader import load_longlive

    with MemoryPeak() as peak, torch.inference_mode():
        start = time.perf_counter()
        patcher, _ = load_longlive(path, adapter=adapter, weight_dtype=getattr(torch, weight_dtype))
        if touch:
            for parameter in patcher.model.diffusion_model.parameters():
                parameter.flatten()[::1024].float().sum()
        seconds = time.perf_counter() - start
        weights = sum(parameter.numel() * parameter.element_size() for parameter in patcher.model.diffusion_model.parameters())
    return {"own": peak.own, "all": peak.all, "seconds": seconds, "weights": weights}


class MemoryPeak:
    """The process's highest RssAnon and VmRSS while the block runs, less what it had before (imports and the like)."""

    def __enter__(self) -> "MemoryPeak":
        self.start = _memory()
        self.own = self.all = 0
        self.done = threading.Event()
        self.thread = threading.Thread(target=self._watch)
        self.thread.start()
        return self

    def _watch(self) -> None:
        while not self.done.wait(SAMPLE_SECONDS):
            own, everything = _memory()
            self.own, self.all = max(self.own, own - self.start[0]), max(self.all, everything - self.start[1])

    def __exit__(self, *_: object) -> None:
        self.done.set()
        self.thread.join()


def _memory() -> tuple[int, int]:
    """(RssAnon, VmRSS) in bytes, as Linux counts them."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return tuple(int(fields[name].split()[0]) * 1024 for name in ("RssAnon", "VmRSS"))


def make_dit(folder: Path, form: str, layers: int) -> tuple[Path, int]:
    """Write a random DiT of the 5B widths tensor by tensor, and return (path, size in bytes)."""
    import torch
    from longlive.accel.checkpoint import DitShape
    from longlive.accel.weight_file import write_safetensors

    shapes = DitShape(3072, 14336, layers, 48, 48).tensors()
    generator = torch.Generator().manual_seed(0)

    def values(shape: tuple[int, ...]) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.bfloat16).normal_(0, 0.02, generator=generator)

    if form == "safetensors":
        path = folder / "model_bf16.safetensors"
        specs = {name: (shape, torch.bfloat16) for name, shape in shapes.items()}
        write_safetensors(path, specs, ((name, values(shape)) for name, shape in shapes.items()), {})
        return path, path.stat().st_size
    content = {"generator": {}}
    for name, shape in shapes.items():
        if form == "packed" and name.startswith("blocks.") and name.endswith(".weight") and len(shape) == 2:
            rows, columns = shape
            layer = f"model.{name.removesuffix('.weight')}"
            content["generator"] |= {
                f"{layer}.quantized_weight_values": torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8, generator=generator),
                f"{layer}.quantized_weight_scale_factors": torch.randint(1, 200, (rows * columns // 16,), generator=generator).float().to(torch.float8_e4m3fn),
                f"{layer}.quantized_weight_amax": torch.tensor([0.1]),
                f"{layer}.quantized_weight_metadata": torch.tensor([rows, columns, rows, columns], dtype=torch.int32),
            }
        else:
            content["generator"][f"model.{name}"] = values(shape)
    if form == "packed":
        content |= {"checkpoint_format": "longlive_generator_nvfp4", "checkpoint_version": 1, "quantization": {"scale_rule": "mse"}}
    path = folder / ("model_4o6.pt" if form == "packed" else "model_bf16.pt")
    torch.save(content, path)
    return path, path.stat().st_size


def make_adapter(folder: Path, layers: int) -> Path:
    """Write a rank-128 adapter on every block linear, as LongLive 2.0's."""
    import torch
    from longlive.accel.checkpoint import DitShape

    path = folder / "lora.pt"
    if path.exists():
        return path
    generator = torch.Generator().manual_seed(1)
    lora = {}
    for name, shape in DitShape(3072, 14336, layers, 48, 48).tensors().items():
        if name.startswith("blocks.") and name.endswith(".weight") and len(shape) == 2:
            base = f"base_model.model.{name.removesuffix('.weight')}"
            lora[f"{base}.lora_A.weight"] = torch.empty(128, shape[1], dtype=torch.bfloat16).normal_(0, 0.02, generator=generator)
            lora[f"{base}.lora_B.weight"] = torch.empty(shape[0], 128, dtype=torch.bfloat16).normal_(0, 0.02, generator=generator)
    torch.save({"generator_lora": lora}, path)
    return path


def _in_child(job: dict) -> dict:
    command = [sys.executable, str(Path(__file__).resolve()), "--child", json.dumps(job)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, env={**os.environ, "MALLOC_ARENA_MAX": "2"})
    return json.loads(done.stdout.decode().splitlines()[-1])


def _bootstrap() -> None:
    """Register the checkout as ``longlive`` and put ComfyUI on the path, as the tests do."""
    sys.path.insert(0, str(TESTS))
    import bootstrap

    sys.path.remove(str(TESTS))
    if bootstrap.COMFYUI is None:
        sys.exit("no ComfyUI found: set COMFYUI_PATH to a ComfyUI folder, or run `python run.py test` once to install one")


if __name__ == "__main__":
    sys.exit(main())
