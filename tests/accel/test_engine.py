"""The chunk loop against a slow cache that really rolls its tensors; gradients; flat memory."""

import gc
import math

import pytest
import torch
from longlive.accel.config import Recipe
from longlive.accel.forward import Memo, chunk_forward, why_not_wan
from longlive.accel.kv_cache import CacheShape, KVCache
from longlive.accel.noise import ChunkNoise
from longlive.accel.presets import LONGLIVE_1
from longlive.accel.sampler import ChunkLoop, ChunkPlan, LoopOptions, Video
from longlive.accel.solver import FlowUniPC, network_timestep, unipc_sigmas
from longlive.accel.state import ModelSignature, snapshot
from longlive.accel.window import Window
from longlive.tests.reference import full_history
from longlive.tests.reference.bare_network import BareNetwork, prompt_rows
from longlive.tests.reference.tiny_dit import TinyDit, attention
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

SIZE = (4, 6)  # latent rows, columns: 2 x 3 = 6 tokens a frame


def recipe(chunk, window, sink, pin=True, steps=2, offset=8.0):
    return Recipe("test", chunk, window, sink, steps, 5.0, "unipc", pin, offset, False, 24)


def new_loop(recipe, network, video=None, options=None, rows=SIZE, dtype=torch.float32):
    dit = network.dit
    tokens = rows[0] * rows[1] // 4
    cache = KVCache(CacheShape(len(dit.blocks), 1, recipe.window_frames, tokens, dit.dim, dtype), torch.device("cpu"))
    video = video or Video(Window(recipe.window_frames, recipe.sink_frames, recipe.shot_pin, keeps_sink=recipe.solver == "renoise"))
    return ChunkLoop(network, recipe, options or LoopOptions(), video, {0: cache}, torch.device("cpu"))


def noise_for(recipe, dit, seed=3, rows=SIZE):
    return ChunkNoise(seed, (1, dit.channels, recipe.chunk_frames, *rows))


@torch.no_grad()
def sample_slowly(dit, recipe, plans, prompts, noise, single_first_frame=False):
    """The reference loop over ``full_history``: same solver, tensors rolled for real."""
    cache = full_history.RolledCache(recipe.window_frames, recipe.sink_frames, recipe.shot_pin, SIZE[0] * SIZE[1] // 4)
    sigmas, out, shot = unipc_sigmas(recipe.steps, recipe.shift), [], 0
    for chunk, plan in enumerate(plans):
        shot += plan.is_cut
        start = sum(x.shape[2] for x in out)
        length = 1 if single_first_frame and chunk == 0 else recipe.chunk_frames
        times = [start + i + shot * recipe.shot_rope_offset for i in range(length)]
        x, solver = noise.initial(chunk)[:, :, :length], FlowUniPC(sigmas)
        for sigma in sigmas[:-1]:
            t = [network_timestep(sigma, "unipc")] * length
            x = solver.step(x, full_history.forward(dit, x, t, prompts[plan.prompt], cache, start, times))
        full_history.forward(dit, x, [0.0] * length, prompts[plan.prompt], cache, start, times)
        if plan.is_cut and recipe.shot_pin and recipe.sink_frames:
            cache.pin_newest(length)
        out.append(x)
    return torch.cat(out, 2)


# chunk, window, sink, pinning, cuts: native proportions, ragged windows, sink larger than a chunk, no sink, window full of protected frames.
WINDOWS = [
    (2, 8, 2, False, ()),
    (2, 8, 2, True, (2,)),
    (2, 8, 2, True, (1, 4, 5)),
    (2, 7, 2, True, (2,)),
    (3, 10, 2, True, (1, 5)),
    (2, 9, 5, True, (3,)),
    (2, 5, 4, True, (1,)),
    (3, 8, 0, True, (2,)),
    (3, 8, 0, False, ()),
    (1, 4, 1, True, (2,)),
    (4, 4, 3, False, ()),
]


@pytest.mark.parametrize(("chunk", "window", "sink", "pin", "cuts"), WINDOWS)
@torch.no_grad()
def test_chunk_loop_equals_rolling_real_tensors(chunk, window, sink, pin, cuts):
    dit, prompts = TinyDit(), prompt_rows("a", "b")
    asked = recipe(chunk, window, sink, pin)
    plans = [ChunkPlan("b" if any(cut <= i for cut in cuts) else "a", is_cut=i in cuts) for i in range(9)]
    noise = noise_for(asked, dit)
    loop = new_loop(asked, BareNetwork(dit, prompts))
    got = torch.cat([loop.run(plan, noise) for plan in plans], 2)
    expected = sample_slowly(dit, asked, plans, prompts, noise)
    assert ((got - expected).norm() / expected.norm()).item() < 2e-6


@torch.no_grad()
def test_a_single_first_frame_moves_every_later_chunk_by_one():
    dit, prompts = TinyDit(), prompt_rows("a", "b")
    asked = recipe(2, 7, 2, True)
    plans = [ChunkPlan("b" if chunk >= 3 else "a", is_cut=chunk == 3) for chunk in range(8)]
    noise = noise_for(asked, dit)
    loop = new_loop(asked, BareNetwork(dit, prompts), options=LoopOptions(single_first_frame=True))
    got = torch.cat([loop.run(plan, noise) for plan in plans], 2)
    expected = sample_slowly(dit, asked, plans, prompts, noise, single_first_frame=True)
    assert got.shape[2] == 15 and ((got - expected).norm() / expected.norm()).item() < 2e-6
    # A rebuild commits chunk by chunk, and the chunks begin at 0, 1, 3, 5, ...
    frames = loop.video.window.frames()
    loop.network.calls.clear()
    loop.rebuild("b")
    groups = [call.placement.frames[-len(call.query_times) :] for call in loop.network.calls]
    assert sum(groups, ()) == frames == loop.video.window.frames()
    assert all(not any(frame == 1 or frame % 2 for frame in group[1:]) for group in groups)


@torch.no_grad()
def test_one_chunk_without_history_is_plain_bidirectional_attention():
    dit, prompts = TinyDit(), prompt_rows("a")
    asked = recipe(3, 12, 3, steps=1)
    network = BareNetwork(dit, prompts)
    loop = new_loop(asked, network)
    x = noise_for(asked, dit).initial(0)
    call = loop._call([700.0, 0.0, 700.0], loop.video.window.enter(0, 3), range(0), commit=False)
    call = type(call)(**{**vars(call), "query_times": (0.0, 1.0, 2.0)})
    got = network.flow(x, 0.7, call, "a")
    cache = full_history.RolledCache(12, 3, True, 6)
    expected = full_history.forward(dit, x, [700.0, 0.0, 700.0], prompts["a"], cache, 0, [0.0, 1.0, 2.0])
    assert torch.allclose(got, expected, atol=2e-6)


@torch.no_grad()
def test_clean_pass_alone_decides_the_cache():
    """Garbage denoising steps leave no trace: after the clean pass the cache equals one that never saw them."""
    dit, prompts = TinyDit(), prompt_rows("a")
    asked = recipe(2, 8, 2)
    noise = noise_for(asked, dit)
    loops = [new_loop(asked, BareNetwork(dit, prompts)) for _ in range(2)]
    x = loops[0].run(ChunkPlan("a"), noise)
    loops[1].video.offsets += [0.0] * 2
    loops[1]._commit(x, 0, "a")
    for layer in range(2):
        for one, other in zip(loops[0].caches[0].view(layer, 2), loops[1].caches[0].view(layer, 2)):
            assert torch.equal(one, other)


@torch.no_grad()
def test_relative_rope_does_not_depend_on_where_the_video_is():
    """Positions follow the place in the window, so the same window content gives the same flow at frame 100 as at frame 0."""
    dit, prompts = TinyDit(), prompt_rows("a")
    asked = recipe(2, 8, 2)
    flows = []
    for base in (0, 100):
        network = BareNetwork(dit, prompts)
        video = Video(Window(8, 2, True), offsets=[0.0] * base)
        video.window.end = base
        loop = new_loop(asked, network, video, LoopOptions(relative_rope=True))
        for chunk in range(2):
            x = noise_for(asked, dit).initial(chunk)
            video.offsets += [0.0] * 2
            loop._commit(x, base + 2 * chunk, "a")
        flows.append(network.flow(x, 0.5, loop._call([500.0] * 2, video.window.enter(base + 2, 2), range(base + 2, base + 4), commit=False), "a"))
    assert torch.equal(*flows)


@torch.no_grad()
def test_past_1024_latent_frames_positions_still_count():
    """Upstream's table ends at 1,024; shifting every position by a constant must leave attention alone, so chunk 0 at frame 5,000 is chunk 0 at frame 0."""
    dit, prompts = TinyDit(), prompt_rows("a")
    asked = recipe(2, 8, 2)
    flows = []
    for base in (0, 5000):
        network = BareNetwork(dit, prompts)
        video = Video(Window(8, 2, True), offsets=[0.0] * (base + 4))
        video.window.end = base
        loop = new_loop(asked, network, video)
        x = noise_for(asked, dit).initial(0)
        loop._commit(x, base, "a")
        flows.append(network.flow(x, 0.5, loop._call([500.0] * 2, video.window.enter(base + 2, 2), range(base + 2, base + 4), commit=False), "a"))
    assert torch.allclose(*flows, atol=1e-4)
    assert not torch.equal(*flows)


def resumed(loop, asked, exact):
    """A state from ``loop`` and a fresh loop that continues it."""
    signature = ModelSignature(4, 128, 2, 1, *SIZE)
    parked = {f"0.{name}": tensor for name, tensor in loop.caches[0].parked().items()} if exact else None
    state = snapshot(loop.video, signature, asked, loop.options, 3, {}, parked)
    again = new_loop(asked, BareNetwork(loop.network.dit, loop.network.prompts), state.to_video(), loop.options)
    if exact:
        again.caches[0].restore({name.removeprefix("0."): tensor for name, tensor in parked.items()})
    return state, again


@pytest.mark.parametrize("stop", [1, 3, 6])
@torch.no_grad()
def test_exact_resume_is_bit_equal(stop):
    dit, prompts = TinyDit(), prompt_rows("a", "b")
    asked = recipe(2, 8, 2)
    plans = [ChunkPlan("a"), ChunkPlan("a"), ChunkPlan("b", is_cut=True), *[ChunkPlan("b")] * 3, ChunkPlan("a", is_cut=True), *[ChunkPlan("a")] * 3]
    noise = noise_for(asked, dit)
    whole = new_loop(asked, BareNetwork(dit, prompts))
    expected = [whole.run(plan, noise) for plan in plans]
    first = new_loop(asked, BareNetwork(dit, prompts))
    for plan in plans[:stop]:
        first.run(plan, noise)
    state, again = resumed(first, asked, exact=True)
    before = {name: tensor.clone() for name, tensor in state.parked.items()}
    for plan, latent in zip(plans[stop:], expected[stop:]):
        assert torch.equal(again.run(plan, noise), latent)
    assert all(torch.equal(before[name], tensor) for name, tensor in state.parked.items()), "a run changed the state it continued"
    assert state.num_frames == 2 * stop


@torch.no_grad()
def test_light_resume_inside_the_first_window_is_equal_and_close_after_it():
    dit, prompts = TinyDit(), prompt_rows("a")
    asked = recipe(2, 8, 2)
    noise = noise_for(asked, dit)
    whole = new_loop(asked, BareNetwork(dit, prompts))
    expected = [whole.run(ChunkPlan("a"), noise) for _ in range(8)]
    for stop, limit in ((3, 1e-6), (6, 0.2)):
        first = new_loop(asked, BareNetwork(dit, prompts))
        for _ in range(stop):
            first.run(ChunkPlan("a"), noise)
        _, again = resumed(first, asked, exact=False)
        again.rebuild("a")
        got = again.run(ChunkPlan("a"), noise)
        error = ((got - expected[stop]).norm() / expected[stop].norm()).item()
        assert error < limit
        assert again.video.window.frames() == (first.video.window.enter(stop * 2, 2), first.video.window.frames())[1]


@torch.no_grad()
def test_recache_on_switch_changes_recent_keys_and_keeps_the_sink():
    dit, prompts = TinyDit(), prompt_rows("a", "b")
    asked = recipe(2, 8, 2)
    loop = new_loop(asked, BareNetwork(dit, prompts))
    for _ in range(5):
        loop.run(ChunkPlan("a"), noise_for(asked, dit))
    before = [tensor.clone() for tensor in loop.caches[0].view(1, 8)]
    frames = loop.video.window.frames()
    loop.recache("b")
    after = loop.caches[0].view(1, 8)
    assert loop.video.window.frames() == frames
    for old, new in zip(before, after):
        assert torch.equal(old[:, :12], new[:, :12])
        assert not torch.allclose(old[:, 12:], new[:, 12:])


@torch.no_grad()
def test_first_generation_runs_with_fresh_noise_and_recache():
    dit, prompts = TinyDit(), prompt_rows("a", "b")
    loop = new_loop(LONGLIVE_1, BareNetwork(dit, prompts))
    noise = noise_for(LONGLIVE_1, dit)
    plans = [*[ChunkPlan("a")] * 5, ChunkPlan("b", is_switch=True), ChunkPlan("b")]
    out = torch.cat([loop.run(plan, noise) for plan in plans], 2)
    commits = [call for call in loop.network.calls if call.commit]
    assert len(commits) == len(plans) + 1
    assert [len(call.query_times) for call in commits] == [3] * 5 + [12, 3, 3]
    assert torch.isfinite(out).all()


def test_forward_is_differentiable_through_the_window():
    """Gradients reach weights and input through queries, the chunk's own keys and the text; they equal finite differences."""
    dit, prompts = TinyDit(), prompt_rows("a")
    asked = recipe(2, 6, 2)
    network = BareNetwork(dit, prompts)
    loop = new_loop(asked, network)
    with torch.no_grad():
        loop.run(ChunkPlan("a"), noise_for(asked, dit))
    loop.video.offsets += [0.0] * 2
    x = noise_for(asked, dit).initial(1).requires_grad_()
    past = [tensor[:, :12].clone() for tensor in loop.caches[0].view(0, 2)]

    def loss():
        loop.memo.cross.clear()  # the weights change between calls here
        call = loop._call([500.0] * 2, loop.video.window.enter(2, 2), range(2, 4), commit=False)
        return network.flow(x, 0.5, call, "a").square().mean()

    value = loss()
    value.backward()
    assert x.grad is not None and torch.isfinite(x.grad).all() and x.grad.abs().max() > 0
    for name in ("blocks.0.self_attn.k.weight", "blocks.1.self_attn.v.weight", "blocks.0.cross_attn.v.weight", "patch_embedding.weight"):
        parameter = dit.get_parameter(name)
        assert parameter.grad is not None and parameter.grad.abs().max() > 0, name
        index = tuple((parameter.grad.abs() == parameter.grad.abs().max()).nonzero()[0].tolist())
        step = 2e-3
        values = []
        for sign in (1, -1):
            with torch.no_grad():
                parameter[index] += sign * step
                values.append(loss().item())
                parameter[index] -= sign * step
        assert (values[0] - values[1]) / (2 * step) == pytest.approx(parameter.grad[index].item(), rel=0.05, abs=1e-5), name
    # The past was not part of the graph and was not disturbed.
    assert all(torch.equal(a, b) for a, b in zip(past, (t[:, :12] for t in loop.caches[0].view(0, 2))))


class CountOps(TorchDispatchMode):
    """Counts tensor operations and the elements that they return."""

    count = elements = 0

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        out = function(*arguments, **(options or {}))
        self.count += 1
        self.elements += sum(t.numel() for t in tree_leaves(out) if isinstance(t, torch.Tensor))
        return out


@torch.no_grad()
def test_work_and_memory_are_flat_to_chunk_300():
    dit, prompts = TinyDit(layers=1), prompt_rows("a", "b")
    asked = recipe(1, 4, 1, steps=1)
    loop = new_loop(asked, BareNetwork(dit, prompts))
    noise = noise_for(asked, dit)
    pointers = [tensor.data_ptr() for tensor in loop.caches[0].keys]
    counts, elements, work = [], [], []
    for chunk in range(300):
        with CountOps() as ops:
            loop.run(ChunkPlan("ab"[chunk // 40 % 2], is_cut=chunk % 40 == 0 and chunk > 0), noise)
        work.append((ops.count, ops.elements))
        loop.network.calls.clear()
        if chunk in (20, 299):
            gc.collect()
            held = {id(t) for t in loop.video.latents}  # the video itself grows, on the CPU
            sizes = [t.numel() for t in gc.get_objects() if type(t) is torch.Tensor and id(t) not in held]
            counts.append(len(sizes))
            elements.append(sum(sizes))
    assert counts[0] == counts[1] and elements[0] == elements[1]
    # The same tensor operations on as many elements: chunk 299 costs what chunk 5 costs, but where a new prompt is projected (every 40 chunks).
    assert {work[chunk] for chunk in range(5, 300) if chunk % 40} == {work[5]}
    assert pointers == [tensor.data_ptr() for tensor in loop.caches[0].keys], "the cache moved"
    assert len(loop.video.window.order) == 4


def test_cache_names_its_size_when_it_does_not_fit():
    shape = CacheShape(30, 1, 10**7, 880, 3072, torch.bfloat16)
    with pytest.raises(torch.OutOfMemoryError, match=f"KV cache needs {shape.num_bytes / 1e9:.2f} GB"):
        KVCache(shape, torch.device("cpu"))


def test_5b_window_is_10_4_gb():
    assert CacheShape(30, 1, 32, 880, 3072, torch.bfloat16).num_bytes == pytest.approx(10.38e9, rel=1e-3)


def test_other_models_are_named():
    assert why_not_wan(TinyDit()) is None
    assert "lacks patch_embedding" in why_not_wan(torch.nn.Linear(2, 2))


def test_text_rows_are_padded_and_cut_to_512():
    """Zero rows are attended to: 5 rows, the same 5 padded to 512, and 600 rows of which the first 512 are these, are one and the same."""
    dit = TinyDit()
    rows = torch.randn(1, 600, 16, generator=torch.Generator().manual_seed(1))
    rows[:, 5:512] = 0
    asked, flows = recipe(2, 6, 2), []
    for name, text in {"short": rows[:, :5], "padded": rows[:, :512], "long": rows}.items():
        network = BareNetwork(dit, {name: text})
        loop = new_loop(asked, network)
        loop.video.offsets += [0.0] * 2
        with torch.no_grad():
            flows.append(
                network.flow(noise_for(asked, dit).initial(0), 0.5, loop._call([500.0] * 2, loop.video.window.enter(0, 2), range(2), commit=False), name)
            )
    assert torch.equal(flows[0], flows[1]) and torch.equal(flows[0], flows[2])
    assert math.isfinite(flows[0].sum().item())


@torch.no_grad()
def test_branches_keep_their_own_window_whether_batched_or_split():
    """Conditional and unconditional passes give the same flow when core batches them (in either order) and when it runs them one by one."""
    dit, prompts = TinyDit(), prompt_rows("yes", "no")
    asked = recipe(2, 6, 2)
    shape = CacheShape(2, 1, 6, 6, 128, torch.float32)

    def run(groups):
        caches = {branch: KVCache(shape, torch.device("cpu")) for branch in (0, 1)}
        window, memo, flows = Window(6, 2), Memo(), {}
        loop = new_loop(asked, BareNetwork(dit, prompts), Video(window, offsets=[0.0] * 8))
        for chunk in range(4):
            x = noise_for(asked, dit).initial(chunk)
            call = loop._call([500.0] * 2, window.enter(2 * chunk, 2), range(2 * chunk, 2 * chunk + 2), commit=False)
            call = type(call)(**{**vars(call), "caches": caches, "memo": memo})
            for group in groups:
                context = torch.cat([prompts[("yes", "no")[branch]] for branch in group])
                out = chunk_forward(dit, torch.cat([x] * len(group)), context, call, branches=group, prompts=group, attention=attention, transformer_options={})
                flows |= {(chunk, branch): flow for branch, flow in zip(group, out)}
        return flows

    split, batched, reversed_ = run([(0,), (1,)]), run([(0, 1)]), run([(1, 0)])
    for key, flow in split.items():
        assert torch.allclose(flow, batched[key], atol=2e-6) and torch.allclose(flow, reversed_[key], atol=2e-6)
    assert not torch.allclose(split[(3, 0)], split[(3, 1)])
