"""Runs the Chunked Sampler node on tiny models; shared by the sampler's and the state's tests."""

import torch
from longlive.accel.timeline import parse
from longlive.nodes.sampler import LongLiveChunkedSampler

TEXT_DIM = 4096
# Chunk 2, window 6, sink 2: the window is full at the third chunk and forgets from the fourth on.
SMALL = dict(steps=2, chunk=2, window=6, sink=2)


def prompt(seed=0, rows=60, batch=1):
    """CONDITIONING of one prompt: random text rows."""
    return [[text(seed, rows, batch), {}]]


def text(seed=0, rows=60, batch=1):
    return torch.randn(batch, rows, TEXT_DIM, generator=torch.Generator().manual_seed(1000 + seed))


def timeline(lines, rows=60, origin="part"):
    """CONDITIONING as Prompt Timeline makes it; the same text always gets the same rows, whatever timeline it stands in."""
    read = parse(lines, origin=origin)
    return [[text(sum(map(ord, words)), rows), {"longlive_id": number, "longlive_timeline": read}] for number, words in enumerate(read.texts)]


def latent(frames=8, channels=48, batch=1, rows=4, columns=4, **note):
    """An empty core LATENT; keywords become its LongLive note."""
    made = {"samples": torch.zeros(batch, channels, frames, rows, columns)}
    return made | ({"longlive": note} if note else {})


def start_image(frames=8, given=1, batch=1, rows=4, columns=4, seed=5):
    """What core's Wan22ImageToVideoLatent gives: the encoded image in the first ``given`` latent frames, where the mask is 0."""
    made = latent(frames, 48, batch, rows, columns)
    picture = torch.randn(1, 48, given, rows, columns, generator=torch.Generator().manual_seed(seed)).repeat(batch, 1, 1, 1, 1)
    made["samples"][:, :, :given] = picture
    made["noise_mask"] = torch.ones(batch, 1, frames, rows, columns)
    made["noise_mask"][:, :, :given] = 0
    return made


def execute(model, positive=None, into=None, **widgets):
    """Run the node; returns its raw outputs (LATENT, state or blocker) and the text it shows."""
    widgets = {"seed": 3, **SMALL, **widgets}
    output = LongLiveChunkedSampler.execute(model, prompt() if positive is None else positive, latent() if into is None else into, **widgets)
    return output.args[0], output.args[1], output.ui.as_dict()["text"][0]


def sample(model, positive=None, into=None, **widgets):
    """Run the node without keeping a state; returns the latents."""
    return execute(model, positive, into, **{"keep_state": "none", **widgets})[0]["samples"]


def difference(one, other):
    """Relative L2 distance."""
    return ((one.double() - other.double()).norm() / other.double().norm()).item()


def lora(layers=2, dim=128, rank=4, seed=2):
    """A tiny LoRA file in the names that core maps."""
    generator = torch.Generator().manual_seed(seed)
    names = [f"diffusion_model.blocks.{layer}.{part}.{linear}" for layer in range(layers) for part in ("self_attn", "cross_attn") for linear in "qkvo"]
    file = {}
    for name in names:
        file[f"{name}.lora_A.weight"] = torch.randn(rank, dim, generator=generator) * 0.1
        file[f"{name}.lora_B.weight"] = torch.randn(dim, rank, generator=generator) * 0.1
    return file
