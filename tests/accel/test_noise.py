"""Noise sources: which numbers they give and what they leave alone."""

import torch
from longlive.accel.noise import ChunkNoise, UpstreamNoise

SHAPE = (2, 3, 4, 2, 2)


def test_a_chunk_does_not_depend_on_length_batch_or_order():
    noise = ChunkNoise(7, SHAPE)
    assert torch.equal(noise.initial(5), ChunkNoise(7, SHAPE).initial(5))
    assert torch.equal(noise.initial(5)[:1], ChunkNoise(7, (1, *SHAPE[1:])).initial(5))
    drawn = [noise.initial(0), noise.initial(1), noise.fresh(0, 0), noise.fresh(0, 1), ChunkNoise(8, SHAPE).initial(0)]
    assert all(not torch.equal(a, b) for i, a in enumerate(drawn) for b in drawn[:i])
    assert not torch.equal(noise.initial(0)[0], noise.initial(0)[1])


def test_it_is_standard_normal():
    sample = ChunkNoise(1, (1, 8, 8, 32, 32)).initial(0)
    assert abs(sample.mean()) < 0.02 and abs(sample.std() - 1) < 0.02


def test_upstream_order_slices_one_draw():
    noise = UpstreamNoise(3, SHAPE, 3)
    whole = torch.randn((2, 12, 3, 2, 2), generator=torch.Generator().manual_seed(3))
    for chunk in range(3):
        assert torch.equal(noise.initial(chunk), whole[:, 4 * chunk : 4 * chunk + 4].transpose(1, 2))


def test_upstream_order_of_fresh_noise():
    """After the whole video's noise the same generator gives one draw a chunk and step, the last step left out; any of them can be asked for."""
    generator = torch.Generator().manual_seed(3)
    torch.randn((2, 12, 3, 2, 2), generator=generator)
    draws = [torch.randn((8, 3, 2, 2), generator=generator).reshape(2, 4, 3, 2, 2).transpose(1, 2) for _ in range(6)]
    noise = UpstreamNoise(3, SHAPE, 3, steps=3)
    for index in (0, 1, 2, 3, 4, 5, 4, 0, 5):
        assert torch.equal(noise.fresh(*divmod(index, 2)), draws[index])
    assert torch.equal(noise.initial(0), UpstreamNoise(3, SHAPE, 3).initial(0))


def test_upstream_order_of_an_extended_video_starts_at_its_own_row_0():
    whole, extended = UpstreamNoise(3, SHAPE, 3), UpstreamNoise(3, SHAPE, 3, first_chunk=5)
    for chunk in range(3):
        assert torch.equal(extended.initial(5 + chunk), whole.initial(chunk))
        assert torch.equal(extended.fresh(5 + chunk, 1), whole.fresh(chunk, 1))


def test_the_global_generator_is_untouched():
    before = torch.random.get_rng_state()
    ChunkNoise(1, SHAPE).initial(0)
    UpstreamNoise(1, SHAPE, 2).initial(1)
    UpstreamNoise(1, SHAPE, 2).fresh(1, 0)
    assert torch.equal(before, torch.random.get_rng_state())


def test_large_seeds_work():
    assert torch.isfinite(ChunkNoise(2**64 - 1, SHAPE).initial(0)).all()
