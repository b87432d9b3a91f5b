"""Runs reference cases through the same loader and sampler code that the nodes use and compares the latents.

    python tests/parity.py DIR [DIR ...]

Each folder (or a folder right below it) holds ``model.safetensors`` and one safetensors file per case (settings in the metadata; noise, prompts and expected
latents as tensors). Prints one line per case (name, worst relative L2 over chunks, pass or fail) and exits non-zero when one is above 1e-5. Float32 on the CPU.
ComfyUI is found as the tests find it: COMFYUI_PATH, else the one that ``python run.py test`` installed. A Python without torch hands over to ComfyUI's.
"""

from __future__ import annotations

import atexit
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

LIMIT = 1e-5
TESTS = Path(__file__).resolve().parent
HANDED_OVER = "LONGLIVE_PARITY_HANDED_OVER"


def _bootstrap() -> None:
    """Register the checkout as ``longlive`` and put ComfyUI on the path, as the tests do."""
    sys.path.insert(0, str(TESTS))
    import bootstrap

    sys.path.remove(str(TESTS))
    atexit.register(bootstrap.clean_up)
    if bootstrap.COMFYUI is None:
        sys.exit("no ComfyUI found: set COMFYUI_PATH to a ComfyUI folder, or run `python run.py test` once to install one")


def ensure_host() -> None:
    """Go on in ComfyUI's own Python, and end with its exit code, where the running one lacks what ComfyUI imports. Found or installed as run.py does it."""
    if all(importlib.util.find_spec(name) for name in ("torch", "einops", "safetensors")):
        return
    sys.path.insert(0, str(TESTS))
    from host.install import Installer
    from host.locate import HostError, find_existing

    sys.path.remove(str(TESTS))
    try:
        host = find_existing() or Installer(TESTS.parent / ".comfy", lambda text: print(text, flush=True)).comfyui()
    except HostError as error:
        sys.exit(f"error: {error}")
    if HANDED_OVER in os.environ:
        sys.exit(f"error: {host.python} lacks torch, einops or safetensors, which ComfyUI needs")
    environment = {**os.environ, "COMFYUI_PATH": str(host.comfyui), HANDED_OVER: "1"}
    sys.exit(subprocess.run([str(host.python), *sys.argv], env=environment).returncode)


def _read(path: Path) -> tuple[dict, dict]:
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}


def _setting(settings: dict, name: str, default: object) -> object:
    """A metadata value; metadata holds Python literals as text."""
    value = settings.get(name)
    if value is None or value == "None":
        return default
    if isinstance(default, bool):
        return value == "True"
    return type(default)(float(value)) if isinstance(default, int) else type(default)(value)


def run_case(model: object, path: Path) -> float:
    """Worst relative L2 error over chunks of one case."""
    tensors, settings = _read(path)
    return worst_error(sample_case(model, tensors, settings), tensors["latents"], _base(tensors, settings)[1])


def worst_error(got: object, expected: object, chunk_frames: int) -> float:
    """The largest relative L2 error of a chunk; latents [batch, frames, channels, height, width]."""
    if got.shape != expected.shape:
        raise AssertionError(f"latents {tuple(got.shape)}, expected {tuple(expected.shape)}")
    pairs = zip(got.double().split(chunk_frames, 1), expected.double().split(chunk_frames, 1), strict=True)
    errors = [((g - e).norm() / e.norm()).item() for g, e in pairs]
    return max(errors) if all(error == error for error in errors) else float("inf")


def _base(tensors: dict, settings: dict) -> tuple[object, int]:
    """The release's recipe that a case starts from, and the case's chunk in latent frames."""
    from longlive.accel.presets import LONGLIVE_1, LONGLIVE_2

    base = LONGLIVE_1 if "renoise" in tensors or "switch_frames" in settings else LONGLIVE_2
    return base, _setting(settings, "frames_per_chunk", base.chunk_frames)


def sample_case(model: object, tensors: dict, settings: dict) -> object:
    """The latents [batch, frames, channels, height, width] that a case's settings and inputs give."""
    import torch
    from longlive.accel.noise import GivenNoise
    from longlive.accel.presets import LONGLIVE_1
    from longlive.accel.sampler import ChunkPlan, LoopOptions
    from longlive.nodes.sampling import sample_video
    from longlive.nodes.sampling_job import SamplingRequest

    base, length = _base(tensors, settings)
    is_first = base is LONGLIVE_1
    window = _setting(settings, "window_frames", base.window_frames)
    if window == -1 and is_first:  # upstream 1.0: the whole video
        window = tensors["noise"].shape[1]
    recipe = replace(
        base,
        chunk_frames=length,
        window_frames=window,
        sink_frames=_setting(settings, "sink_frames", base.sink_frames),
        steps=_setting(settings, "steps", len(tensors["denoising_timesteps"]) if "denoising_timesteps" in tensors else base.steps),
        shift=_setting(settings, "shift", base.shift),
        shot_pin=_setting(settings, "multi_shot_sink", False),
        shot_rope_offset=_setting(settings, "multi_shot_rope_offset", 0.0),
    )
    options = LoopOptions(
        clean_recache=_setting(settings, "shot_clean_recache", False),
        relative_rope=_setting(settings, "relative_rope", False),
        time_scale=_setting(settings, "t_scale", 1.0),
        keep_sink=_setting(settings, "global_sink", True),
    )
    noise = tensors["noise"].transpose(1, 2)
    batch, channels, _, height, width = noise.shape
    given = tensors.get("initial_latent")
    is_image = given is not None and _setting(settings, "independent_first_frame", False)
    is_single = given is None and _setting(settings, "independent_first_frame", False)
    prefix = given.shape[1] // length if given is not None and not is_image else 0
    chunks = -(-noise.shape[2] // length)  # with a single first frame, one more than whole chunks

    plans, entries = _prompts(tensors, settings, chunks, length, batch, is_first)
    positive = [[rows, {}] for rows in entries]
    cfg = _setting(settings, "guidance_scale", 1.0)
    negative = None
    if cfg != 1.0:
        negative = [[_padded(tensors["negative_embeds"]), {}]]

    process_out = model.model.process_latent_out
    latent = {"samples": torch.zeros(noise.shape)}
    if is_image:
        count = given.shape[1]
        latent["samples"][:, :, :count] = process_out(given.transpose(1, 2).float())
        latent["noise_mask"] = torch.ones(batch, 1, noise.shape[2], height, width)
        latent["noise_mask"][:, :, :count] = 0
    renoise = tensors.get("renoise")
    if renoise is not None:  # [chunk, step, batch * frame, channel, height, width] -> (chunk, step, B, C, f, H, W)
        renoise = renoise.reshape(*renoise.shape[:2], batch, length, *renoise.shape[-3:]).transpose(3, 4)
    source = GivenNoise(noise.float(), length, prefix, None if renoise is None else renoise.float(), is_single)
    extend = {"samples": process_out(given.transpose(1, 2).float())} if prefix else None
    plans = [ChunkPlan(index, cut, switch) for index, cut, switch in plans]
    request = SamplingRequest(recipe, replace(options, single_first_frame=is_single), cfg=cfg, kv_dtype=torch.float32, park="none")
    result = sample_video(model, positive, negative, latent, request, extend=extend, noise=source, plans=plans)
    return model.model.process_latent_in(result.latent["samples"].float()).transpose(1, 2)


def _padded(rows: object) -> object:
    import torch

    rows = rows if rows.ndim == 3 else rows.unsqueeze(0)
    return torch.nn.functional.pad(rows.float(), (0, 0, 0, 512 - rows.shape[1]))


def _prompts(tensors: dict, settings: dict, chunks: int, length: int, batch: int, is_first: bool) -> tuple[list, list]:
    """Per chunk (entry, is_cut, is_switch), and the entries' text rows."""
    embeds = _padded(tensors["prompt_embeds"])
    if is_first:
        switches = json.loads(settings.get("switch_frames", "[]"))
        texts = json.loads(settings["prompts"])
        if "prompt_index" in tensors:  # (batch, segments)
            rows = [column.tolist() for column in tensors["prompt_index"].reshape(batch, -1).T]
        else:
            distinct = list(dict.fromkeys(texts))
            rows = [[distinct.index(text) if embeds.shape[0] == len(distinct) else place] for place, text in enumerate(texts)]
        entries = [embeds[row] for row in rows]
        plans, segment = [], 0
        for chunk in range(chunks):
            # One switch per chunk: of two that fall on the same chunk, upstream takes the second one chunk later.
            switched = segment < len(switches) and chunk * length >= switches[segment]
            segment += switched
            plans.append((segment, False, switched))
        return plans, entries
    index = tensors["prompt_index"]
    index = index.reshape(-1, index.shape[-1])  # (batch or 1, chunks)
    texts = json.loads(settings["prompts"])
    texts = texts[0] if texts and isinstance(texts[0], list) else texts
    entries, numbers, plans = [], {}, []
    for chunk in range(chunks):
        key = tuple(index[:, chunk].tolist())
        if key not in numbers:
            numbers[key] = len(entries)
            entries.append(embeds[list(key)])
        cut = chunk > 0 and texts[chunk].startswith("The scene transitions. ")
        plans.append((numbers[key], cut, False))
    return plans, entries


def _with_model(paths: Iterable[Path]) -> Iterator[Path]:
    """The folders among ``paths``, and the folders right below them, that hold a model; says what it passes over."""
    for path in paths:
        found = [folder for folder in (path, *sorted(path.glob("*/"))) if (folder / "model.safetensors").is_file()]
        if not found:
            print(f"{path}: no model.safetensors in it or right below it, passed over")
        yield from found


def main(folders: list[str]) -> int:
    if not folders:
        print(__doc__)
        return 2
    ensure_host()
    _bootstrap()
    import torch
    from longlive.nodes.loader import load_longlive

    failed = total = 0
    with torch.inference_mode():
        for folder in _with_model(map(Path, folders)):
            model, _ = load_longlive(folder / "model.safetensors", weight_dtype=torch.float32)
            for path in sorted(folder.glob("*.safetensors")):
                if path.name == "model.safetensors":
                    continue
                total += 1
                try:
                    error = run_case(model, path)
                    verdict = "pass" if error <= LIMIT else "FAIL"
                except Exception as problem:
                    error, verdict = float("nan"), f"FAIL ({type(problem).__name__}: {problem})"
                failed += verdict != "pass"
                print(f"{folder.name}/{path.stem}: {error:.2e} {verdict}", flush=True)
    print(f"{total - failed} passed, {failed} failed")
    return 1 if failed or not total else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
