"""Frozen regression cases: what a case computes from seed-made weights, noise and prompts is kept in ``tests/data``, so that no reference files are needed.

    python tests/freeze_cases.py                    compare, a line per case
    python tests/freeze_cases.py --write DIR...     freeze anew, after the reference cases in DIR (see parity.py) pass

A file holds the settings, in the words of the reference cases and of ``parity.py``, and the latents in float32. Weights and inputs come from integers, so
that they are the same bits on every machine. ``tests/nodes/test_regression.py`` compares them and shows that a changed rule is noticed.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path

DATA = Path(__file__).resolve().parent / "data"
LIMIT = 1e-5
CUT = "The scene transitions. "
TEXT_DIM, TEXT_ROWS = 4096, 12

# 2.0: chunks of 2 latent frames in a window of 8, so that a few small chunks reach every rule. 1.0: its own 3, 12 and 3.
COMMON = dict(grid="4x2", chunks=6, steps=4, shift=5.0)
SECOND = COMMON | dict(release="2.0", frames_per_chunk=2, window_frames=8, sink_frames=2, multi_shot_sink=True, multi_shot_rope_offset=8.0)
FIRST = COMMON | dict(release="1.0", frames_per_chunk=3, window_frames=12, sink_frames=3, switch_frames=(), global_sink=True)

# ``shots``: the prompt of each chunk by number, a new number is a cut. ``given``: latent frames of a start image or of a video to extend.
CASES: dict[str, dict] = {
    "t2v": SECOND,
    "t2v_chunk8": SECOND | dict(chunks=6, frames_per_chunk=8, window_frames=32, sink_frames=8, shots=(0, 0, 1, 1, 1, 1), steps=2),
    "one_cut": SECOND | dict(chunks=8, shots=(0, 0, 1, 1, 1, 1, 1, 1)),
    "cuts_4_9": SECOND | dict(chunks=12, shots=(0,) * 4 + (1,) * 5 + (2,) * 3),
    "cuts_recache": SECOND | dict(chunks=8, shots=(0, 0, 1, 1, 1, 2, 2, 2), shot_clean_recache=True),
    "cuts_no_pin": SECOND | dict(chunks=8, shots=(0, 0, 1, 1, 1, 1, 1, 1), multi_shot_sink=False),
    "cuts_ragged_window": SECOND | dict(chunks=9, window_frames=7, shots=(0, 0, 0, 1, 1, 1, 1, 1, 1)),
    "cuts_large_sink": SECOND | dict(chunks=9, window_frames=11, sink_frames=5, shots=(0, 0, 0, 1, 1, 1, 1, 1, 1)),
    "recache_in_large_sink": SECOND | dict(chunks=7, window_frames=10, sink_frames=6, shots=(0, 1, 1, 1, 1, 1, 1), shot_clean_recache=True),
    "no_sink": SECOND | dict(chunks=7, sink_frames=0, shots=(0, 0, 0, 1, 1, 1, 1)),
    "i2v": SECOND | dict(given=1, independent_first_frame=True),
    "i2v_cuts": SECOND | dict(chunks=8, given=1, independent_first_frame=True, shots=(0, 0, 1, 1, 1, 1, 1, 1)),
    "relative_rope_cuts": SECOND | dict(chunks=8, relative_rope=True, shots=(0, 0, 1, 1, 1, 1, 1, 1)),
    "cfg_cuts": SECOND | dict(chunks=8, guidance_scale=3.0, shots=(0, 0, 1, 1, 1, 1, 1, 1)),
    "steps2": SECOND | dict(steps=2),
    "steps3_cut": SECOND | dict(steps=3, shots=(0, 0, 0, 1, 1, 1)),
    "steps8_shift3": SECOND | dict(chunks=5, steps=8, shift=3.0),
    "extension_past_the_window": SECOND | dict(chunks=3, given=12),
    "extension_cut": SECOND | dict(chunks=5, given=4, shots=(0, 1, 1, 1, 1), one_prompt=True),
    "t_scale_cuts": SECOND | dict(chunks=7, t_scale=0.5, shots=(0, 0, 1, 1, 1, 1, 1)),
    "batch2_cuts": SECOND | dict(chunks=7, batch=2, shots=(0, 0, 1, 1, 1, 1, 1)),
    "grid_6x8": SECOND | dict(chunks=5, grid="6x8", steps=2),
    "first_t2v": FIRST,
    "first_switch": FIRST | dict(switch_frames=(12,)),
    "first_switch_off_grid": FIRST | dict(chunks=7, switch_frames=(13,)),
    "first_switch_no_global_sink": FIRST | dict(chunks=7, switch_frames=(15,), global_sink=False),
    "first_switch_early": FIRST | dict(switch_frames=(6,)),
    "first_large_sink": FIRST | dict(sink_frames=6, switch_frames=(16,)),
    "first_ragged_window": FIRST | dict(window_frames=14, switch_frames=(16,)),
    "first_batch2": FIRST | dict(batch=2, switch_frames=(15,)),
}


def draw(seed: int, *shape: int):
    """Numbers of mean 0 and variance 1, nearly Gaussian, float32: sums of drawn integers, hence the same bits on every machine."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-1024, 1025, (6, *shape), generator=generator).sum(0) / 1448.5  # 1448.5^2 = 6 * 1025^2 / 3, to 5 digits


def make_weights(channels: int, seed: int = 20, dim: int = 256, layers: int = 2) -> dict:
    """A DiT's state dict with upstream's names: at the scale of its inputs, so that every rule moves the result."""
    shapes = {"patch_embedding.weight": (dim, channels, 1, 2, 2), "patch_embedding.bias": (dim,)}
    for name, out, into in (
        ("text_embedding.0", dim, TEXT_DIM),
        ("text_embedding.2", dim, dim),
        ("time_embedding.0", dim, 256),
        ("time_embedding.2", dim, dim),
        ("time_projection.1", 6 * dim, dim),
        ("head.head", channels * 4, dim),
    ):
        shapes |= {f"{name}.weight": (out, into), f"{name}.bias": (out,)}
    shapes["head.modulation"] = (1, 2, dim)
    for layer in range(layers):
        block = f"blocks.{layer}"
        shapes |= {f"{block}.modulation": (1, 6, dim), f"{block}.norm3.weight": (dim,), f"{block}.norm3.bias": (dim,)}
        for part in ("self_attn", "cross_attn"):
            for linear in "qkvo":
                shapes |= {f"{block}.{part}.{linear}.weight": (dim, dim), f"{block}.{part}.{linear}.bias": (dim,)}
            shapes |= {f"{block}.{part}.norm_q.weight": (dim,), f"{block}.{part}.norm_k.weight": (dim,)}
        shapes |= {f"{block}.ffn.0.weight": (2 * dim, dim), f"{block}.ffn.0.bias": (2 * dim,)}
        shapes |= {f"{block}.ffn.2.weight": (dim, 2 * dim), f"{block}.ffn.2.bias": (dim,)}
    weights = {}
    for number, (name, shape) in enumerate(shapes.items()):
        values = draw(1000 * seed + number, *shape)
        if name.endswith(("norm_q.weight", "norm_k.weight")):
            values = 1.5 + 0.25 * values  # sharp attention
        elif name.endswith("norm3.weight"):
            values = 1 + 0.25 * values
        elif len(shape) > 1 and name.endswith("weight"):
            values = values / values[0].numel() ** 0.5
        else:
            values = 0.25 * values
        weights[name] = values
    return weights


def settings_of(case: Mapping) -> dict[str, str]:
    """A case in the words of the reference cases' metadata."""
    case = dict(case)
    shots = case.pop("shots", None) or (0,) * case["chunks"]
    switches = case.get("switch_frames")
    if switches is not None:
        case["switch_frames"] = json.dumps(switches)
        texts = [f"prompt {number}" for number in range(len(switches) + 1)]
    else:
        texts = [CUT * (chunk > 0 and shot != shots[chunk - 1]) + f"prompt {shot}" for chunk, shot in enumerate(shots)]
    batch = case.get("batch", 1)
    case["prompts"] = json.dumps(texts if batch == 1 or switches is not None else [texts] * batch)
    return {name: str(value) for name, value in case.items()}


def make_inputs(settings: Mapping[str, str], seed: int = 30) -> dict:
    """Noise, prompts and what else a case's settings call for, in the layout of the reference cases."""
    import torch

    batch, chunks, length = (int(settings.get(name, 1)) for name in ("batch", "chunks", "frames_per_chunk"))
    rows, columns = map(int, settings["grid"].split("x"))
    is_first = settings["release"] == "1.0"
    picture = (16 if is_first else 48, rows, columns)
    tensors = {"noise": draw(seed, batch, chunks * length, *picture)}
    texts = json.loads(settings["prompts"])
    if is_first:
        tensors["renoise"] = draw(seed + 1, chunks, int(settings["steps"]) - 1, batch * length, *picture)
        count = len(texts) * batch
        tensors["prompt_index"] = torch.arange(count).reshape(batch, len(texts))
    else:
        texts = texts[0] if batch > 1 else texts
        distinct = [text for number, text in enumerate(texts) if text not in texts[:number]]
        index = torch.tensor([[distinct.index(text) + row * len(distinct) for text in texts] for row in range(batch)])
        if settings.get("one_prompt") == "True":
            index = index * 0
        tensors["prompt_index"] = index[0] if batch == 1 else index
        count = int(index.max()) + 1
    tensors["prompt_embeds"] = draw(seed + 2, count, TEXT_ROWS, TEXT_DIM)
    if float(settings.get("guidance_scale", 1)) != 1:
        tensors["negative_embeds"] = draw(seed + 3, batch, TEXT_ROWS, TEXT_DIM)
    if "given" in settings:
        tensors["initial_latent"] = draw(seed + 4, batch, int(settings["given"]), *picture)
    return tensors


def load_models(folder: Path) -> dict[str, object]:
    """The two tiny models by release, saved to ``folder`` and loaded as the loader node does."""
    import torch
    from longlive.nodes.loader import load_longlive
    from safetensors.torch import save_file

    models = {}
    for release, channels in (("2.0", 48), ("1.0", 16)):
        path = folder / f"tiny-{release}.safetensors"
        save_file(make_weights(channels), path)
        models[release] = load_longlive(path, weight_dtype=torch.float32)[0]
    return models


def compute(models: Mapping[str, object], settings: Mapping[str, str]):
    """The latents [batch, frames, channels, height, width] of a case, through the code that the nodes and parity.py use."""
    from longlive.tests import parity

    return parity.sample_case(models[settings["release"]], make_inputs(settings), dict(settings))


def read(path: Path):
    """A frozen case: its settings and latents."""
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        return file.metadata(), file.get_tensor("latents")


def error_of(models: Mapping[str, object], settings: Mapping[str, str], expected) -> float:
    """Worst relative L2 error over chunks."""
    from longlive.tests import parity

    return parity.worst_error(compute(models, settings), expected, int(settings["frames_per_chunk"]))


def _write(models: Mapping[str, object]) -> None:
    from safetensors.torch import save_file

    frozen = {name: (settings_of(case), compute(models, settings_of(case))) for name, case in CASES.items()}
    DATA.mkdir(exist_ok=True)
    for path in DATA.glob("*.safetensors"):
        path.unlink()
    for name, (settings, latents) in frozen.items():
        save_file({"latents": latents.contiguous()}, DATA / f"{name}.safetensors", metadata=settings)
    total = sum(path.stat().st_size for path in DATA.glob("*.safetensors"))
    print(f"{len(CASES)} cases, {total / 1e3:.0f} kB")


def main(arguments: list[str]) -> int:
    sys.path.insert(0, str(Path(__file__).resolve().parent))
    import parity

    parity._bootstrap()
    import tempfile

    import torch

    if arguments[:1] == ["--write"]:
        if not arguments[1:] or parity.main(arguments[1:]) != 0:
            print("nothing is written: the reference cases in the given folders must pass first (python tests/freeze_cases.py --write DIR...)")
            return 1
    elif arguments:
        print(__doc__)
        return 2
    failed = 0
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        models = load_models(Path(folder))
        if arguments:
            _write(models)
        for path in sorted(DATA.glob("*.safetensors")):
            error = error_of(models, *read(path))
            failed += not error <= LIMIT
            print(f"{path.stem}: {error:.2e} {'pass' if error <= LIMIT else 'FAIL'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
