"""nodes.vae_build: small Wan VAEs behind core's own VAE class and nodes."""

import pytest
import torch
from longlive.nodes import vae_build
from longlive.nodes.vae_build import Wan22Widths
from longlive.tests import tiny_vae

import nodes as core_nodes


@pytest.fixture(scope="module")
def model():
    return tiny_vae.wan22()


@pytest.fixture(scope="module")
def vae(model):
    return vae_build.build_vae(model.state_dict(), dtype=torch.float32)


def test_widths_are_read_from_shapes(model):
    assert Wan22Widths.read(model.state_dict()) == Wan22Widths(48, 8, 16, (1, 2, 4, 4), 2, (False, True, True))


def test_widths_of_the_released_vae():
    with torch.device("meta"):
        from comfy.ldm.wan.vae2_2 import WanVAE

        state = WanVAE(dim=160, dec_dim=256, z_dim=48, **tiny_vae.LEVELS).state_dict()
    assert Wan22Widths.read(state) == Wan22Widths(48, 160, 256, (1, 2, 4, 4), 2, (False, True, True))


def test_core_decode_node_takes_it(model, vae):
    z = tiny_vae.latents(48, 3)
    (images,) = core_nodes.VAEDecode().decode(vae, {"samples": z})
    with torch.no_grad():
        expected = model.decode(z)[0].movedim(0, -1)
    assert torch.equal(images, ((expected + 1) / 2).clamp(0, 1))
    assert images.shape == (9, 32, 48, 3) and images.std() > 0.05


def test_core_tiled_decode_node_takes_it(vae):
    z = tiny_vae.latents(48, 2, 6, 6)
    with torch.inference_mode():  # as the server runs every node
        (images,) = core_nodes.VAEDecodeTiled().decode(vae, {"samples": z}, tile_size=64, overlap=32)
    assert images.shape == (5, 96, 96, 3) and torch.isfinite(images).all() and images.std() > 0.05


def test_core_encode_node_takes_it(model, vae):
    pixels = torch.rand(5, 32, 48, 3, generator=torch.Generator().manual_seed(2))
    latent = core_nodes.VAEEncode().encode(vae, pixels)[0]["samples"]
    with torch.no_grad():
        expected = model.encode((pixels * 2 - 1).movedim(-1, 0).unsqueeze(0))
    assert latent.shape == (1, 48, 2, 2, 3)
    torch.testing.assert_close(latent, expected)


def test_a_decoder_without_encoder_decodes_and_refuses_to_encode(model):
    state = {name: value for name, value in model.state_dict().items() if not name.startswith(("encoder.", "conv1."))}
    vae = vae_build.build_vae(state, dtype=torch.float32)
    z = tiny_vae.latents(48, 2)
    with torch.no_grad():
        expected = model.decode(z)[0].movedim(0, -1)
    assert torch.equal(vae.decode(z)[0], ((expected + 1) / 2).clamp(0, 1))
    for encode in vae.encode, vae.encode_tiled:
        with pytest.raises(ValueError, match="decoder only"):
            encode(torch.rand(1, 32, 48, 3))


def test_wan21_structure_goes_to_core():
    model = tiny_vae.wan21()
    vae = vae_build.build_vae(model.state_dict(), dtype=torch.float32)
    z = tiny_vae.latents(16, 2)
    with torch.no_grad():
        expected = model.decode(z)[0].movedim(0, -1)
    assert vae.latent_channels == 16
    assert torch.equal(vae.decode(z)[0], ((expected + 1) / 2).clamp(0, 1))


def test_load_vae_reads_a_file(model, tmp_path):
    import comfy.utils

    path = tmp_path / "tiny.safetensors"
    comfy.utils.save_torch_file(model.state_dict(), str(path))
    assert vae_build.load_vae(str(path)).widths.dec_dim == 16


def test_wrong_files_are_refused_by_name(model):
    state = dict(model.state_dict())
    with pytest.raises(ValueError, match="no conv2.weight"):
        Wan22Widths.read({name: value for name, value in state.items() if name != "conv2.weight"})
    state["decoder.head.2.weight"] = state["decoder.head.2.weight"][:, :8]
    with pytest.raises(ValueError, match=r"1 tensors .* decoder.head.2.weight must be \(12, 16, 3, 3, 3\), got \(12, 8, 3, 3, 3\)"):
        vae_build.build_vae(state)
    with pytest.raises(RuntimeError, match="VAE is invalid"):
        vae_build.build_vae({"nonsense": torch.zeros(1)})
