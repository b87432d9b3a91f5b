"""The Attention Accelerator node on core models: what it computes, what it reports, and how it lives with other nodes."""

import gc
import inspect
import json
import sys
import types
import weakref

import comfy.ldm.modules.attention
import comfy.sample
import pytest
import torch
from comfy.patcher_extension import CallbacksMP
from longlive.accel.override import SLOT, TAG
from longlive.accel.plan import HOST, AttentionRequest
from longlive.kernels import dispatch
from longlive.kernels.dispatch import names
from longlive.nodes.accelerate import KEY, LongLiveAttentionAccelerator, accelerate, nominal_problem
from longlive.nodes.sampler import LongLiveChunkedSampler
from longlive.tests.nodes.tiny_wan import tiny_wan

LAYERS, STEPS = 2, 2


@pytest.fixture(scope="module")
def wan():
    return tiny_wan(48, layers=LAYERS)


def sample(model, cfg=3.0, seed=5):
    """Core's KSampler on a tiny latent: 2 steps, positive and negative in one batch."""
    generator = torch.Generator().manual_seed(9)
    text = [torch.randn(1, 7, 4096, generator=generator) for _ in range(2)]
    latent = torch.zeros(1, 48, 2, 4, 4)
    noise = comfy.sample.prepare_noise(latent, seed)
    positive, negative = ([[tensor, {}]] for tensor in text)
    return comfy.sample.sample(model, noise, STEPS, cfg, "euler", "simple", positive, negative, latent, disable_pbar=True, seed=seed)


@pytest.fixture(scope="module")
def plain(wan):
    return sample(wan)


def accelerated(model, mode="auto", **kwargs):
    return accelerate(model, AttentionRequest(mode), **kwargs)


@pytest.fixture
def sent(monkeypatch):
    """(text, node id) of everything that was sent to the frontend."""
    texts = []
    server = types.ModuleType("server")
    server.PromptServer = types.SimpleNamespace(
        instance=types.SimpleNamespace(send_progress_text=lambda text, node_id, sid=None: texts.append((text, node_id)))
    )
    monkeypatch.setitem(sys.modules, "server", server)
    return texts


def test_plain_wan_under_core_ksampler(wan, plain):
    model, accelerator = accelerated(wan)
    torch.testing.assert_close(sample(model), plain, rtol=1e-4, atol=1e-4)
    counts = accelerator.report()["counts"]
    assert counts["calls"] == counts["accelerated"] == counts["plain"] == 2 * LAYERS * STEPS
    assert counts["self"] == counts["cross"] == LAYERS * STEPS
    assert counts["implementations"] == {"torch": 2 * LAYERS * STEPS}
    # 2 latent frames of 2 x 2 tokens; positive and negative in one batch; 7 tokens of text
    assert counts["shapes"] == {"2x2x8x8x128 float32": LAYERS * STEPS, "2x2x8x7x128 float32": LAYERS * STEPS}
    assert counts["cached"] == 0 and counts["passed_on"] == {}


def test_a_wrong_implementation_would_be_noticed(wan, plain, monkeypatch):
    """The comparison above must see it when the override computes something else."""
    load = dispatch.Impl.load
    monkeypatch.setattr(dispatch.Impl, "load", lambda self: lambda q, k, v, *, problem: 1.1 * load(self)(q, k, v, problem=problem))
    assert not torch.allclose(sample(accelerated(wan)[0]), plain, rtol=1e-4, atol=1e-4)


def test_off_is_bit_equal_and_still_reports(wan, plain):
    model, accelerator = accelerated(wan, "off")
    assert torch.equal(sample(model), plain)
    report = accelerator.report()
    assert (report["requested"], report["effective"], report["why"]) == ("off", HOST, "attention is off")
    assert report["counts"]["passed_on"] == {"attention is off": 2 * LAYERS * STEPS}
    assert report["counts"]["accelerated"] == 0


def test_a_row_by_name(wan, plain):
    model, accelerator = accelerated(wan, "reference")
    torch.testing.assert_close(sample(model), plain, rtol=1e-4, atol=1e-4)
    assert accelerator.report()["effective"] == "reference"


def test_the_original_model_is_untouched(wan, plain):
    before = dict(wan.model_options.get("transformer_options", {}))
    accelerated(wan)
    assert wan.model_options.get("transformer_options", {}) == before
    assert wan.get_attachment(KEY) is None and KEY not in wan.callbacks.get(CallbacksMP.ON_PRE_RUN, {})
    assert torch.equal(sample(wan), plain)


@pytest.mark.parametrize("after", [False, True], ids=["lora then accelerator", "accelerator then lora"])
def test_lora_composes(wan, plain, after):
    name = "diffusion_model.blocks.0.self_attn.v.weight"
    generator = torch.Generator().manual_seed(3)
    patch = {name: ("diff", (torch.randn(wan.model.state_dict()[name].shape, generator=generator),))}
    with_lora = wan.clone()
    assert with_lora.add_patches(patch) == [name]
    expected = sample(with_lora)
    if after:
        model, accelerator = accelerated(wan)
        model = model.clone()
        model.add_patches(patch)
    else:
        model, accelerator = accelerated(with_lora)
    torch.testing.assert_close(sample(model), expected, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(expected, plain, rtol=1e-3, atol=1e-3), "the LoRA has no effect, so the test shows nothing"
    assert accelerator.report()["counts"]["accelerated"] == 2 * LAYERS * STEPS


def attend(options, q_len, k_len, **kwargs):
    """One call of core's attention, as a Wan block or our own forward makes it."""
    generator = torch.Generator().manual_seed(q_len + k_len)
    q = torch.randn(1, q_len, 256, generator=generator)
    k, v = torch.randn(2, 1, k_len, 256, generator=generator)
    expected = comfy.ldm.modules.attention.optimized_attention(q, k, v, heads=2, **kwargs)
    out = comfy.ldm.modules.attention.optimized_attention(q, k, v, heads=2, transformer_options=options, **kwargs)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)


def test_cached_calls_where_q_and_k_differ(wan):
    model, accelerator = accelerated(wan)
    options = model.model_options["transformer_options"]
    for kind, q_len, k_len in (("self", 8, 8), ("self", 8, 24), ("self", 8, 32), ("cross", 8, 7)):
        attend({**options, TAG: {"kind": kind, "layer": 0, "commit": False}}, q_len, k_len)
    counts = accelerator.report()["counts"]
    assert (counts["accelerated"], counts["cached"], counts["self"], counts["cross"], counts["plain"]) == (4, 2, 3, 1, 0)


def test_options_of_core_that_cannot_be_honoured_are_passed_on(wan):
    model, accelerator = accelerated(wan)
    options = model.model_options["transformer_options"]
    attend(options, 8, 8, mask=torch.zeros(8, 8))
    attend(options, 8, 8, mask=torch.zeros(8, 8))
    attend(options, 8, 8, low_precision_attention=False)
    attend(options, 8, 8, future_option=1)
    report = accelerator.report()
    assert report["counts"]["passed_on"] == {
        "the call carries a mask": 2,
        "the call carries an option that is not known here: future_option": 1,
    }
    assert report["counts"]["accelerated"] == 1
    assert report["effective"] == f"{HOST}, torch"


def sample_chunks(model, seed=4):
    """The Chunked Sampler on three chunks of 2 latent frames with a window of 4: the second and third look back."""
    generator = torch.Generator().manual_seed(9)
    latent = {"samples": torch.zeros(1, 48, 6, 4, 4)}
    positive = [[torch.randn(1, 7, 4096, generator=generator), {}]]
    output = LongLiveChunkedSampler.execute(model, positive, latent, seed=seed, steps=STEPS, chunk=2, window=4, sink=2, keep_state="none")
    return output.args[0]


def test_longlive_chunks_look_back_through_the_accelerator(wan, sent):
    expected = sample_chunks(wan)
    model, accelerator = accelerated(wan, node_id="17")
    latent = sample_chunks(model)
    torch.testing.assert_close(latent["samples"], expected["samples"], rtol=1e-4, atol=1e-4)
    counts = accelerator.report()["counts"]
    assert counts["accelerated"] == counts["calls"] and counts["plain"] == 0
    # Each chunk is denoised in 2 steps and then passed clean, where the last layer only writes its keys and values.
    full = 3 * STEPS * LAYERS
    clean = 3 * (LAYERS - 1)
    assert counts["self"] == counts["cross"] == full + clean
    assert counts["cached"] == (full + clean) * 2 // 3
    assert counts["shapes"] == {
        "1x2x8x16x128 float32": (full + clean) * 2 // 3,
        "1x2x8x8x128 float32": (full + clean) // 3,
        "1x2x8x512x128 float32": full + clean,  # prompts are padded to the length the model was trained on
    }
    before, after = (text for text, node in sent if node == "17")
    assert "calls: " not in before and f"cached: {counts['cached']}\n" in after
    assert latent["longlive"]["report"]["attention"]["counts"] == counts
    assert expected["longlive"]["report"]["attention"] is None


def test_off_is_bit_equal_under_the_chunked_sampler(wan):
    model, accelerator = accelerated(wan, "off")
    assert torch.equal(sample_chunks(model)["samples"], sample_chunks(wan)["samples"])
    assert accelerator.report()["counts"]["cached"] > 0


def test_the_chunked_sampler_puts_the_override_back_too(wan):
    model, accelerator = accelerated(wan)
    model = model.clone()
    usurper = model.model_options["transformer_options"][SLOT] = counting()
    sample_chunks(model)
    assert usurper.number == 0 and accelerator.report()["counts"]["cached"] > 0


def counting(previous=None):
    def override(func, *args, **kwargs):
        override.number += 1
        return func(*args, **kwargs) if previous is None else previous(func, *args, **kwargs)

    override.number = 0
    return override


def test_an_override_that_was_there_gets_what_is_declined(wan, plain):
    below = counting()
    with_override = wan.clone()
    with_override.model_options["transformer_options"][SLOT] = below
    model, accelerator = accelerated(with_override, "off")
    assert torch.equal(sample(model), plain)
    assert below.number == 2 * LAYERS * STEPS
    assert "counting.<locals>.override" in accelerator.report()["notes"][0]
    below.number = 0
    sample(accelerated(with_override)[0])
    assert below.number == 0


def test_an_override_set_later_that_drops_ours_is_put_behind_it(wan, plain):
    """ComfyUI has one slot; a node that overwrites it used to switch the accelerator off in silence."""
    model, accelerator = accelerated(wan)
    model = model.clone()
    usurper = model.model_options["transformer_options"][SLOT] = counting()
    torch.testing.assert_close(sample(model), plain, rtol=1e-4, atol=1e-4)
    report = accelerator.report()
    assert report["counts"]["accelerated"] == 2 * LAYERS * STEPS and usurper.number == 0
    assert any("another node took the override slot 1 times" in note for note in report["notes"])
    assert model.model_options["transformer_options"][SLOT] is usurper, "only the run's own options change"


def test_an_override_set_later_that_chains_keeps_the_slot(wan):
    model, accelerator = accelerated(wan)
    model = model.clone()
    outer = model.model_options["transformer_options"][SLOT] = counting(model.model_options["transformer_options"][SLOT])
    sample(model)
    assert outer.number == accelerator.report()["counts"]["accelerated"] == 2 * LAYERS * STEPS
    assert accelerator.report()["notes"] == []


def test_an_override_in_front_that_computes_everything_is_said(wan, sent):
    model, accelerator = accelerated(wan, node_id="4")
    mine = model.model_options["transformer_options"][SLOT]

    def greedy(func, *args, **kwargs):
        return mine(func, *args, **kwargs) if kwargs.get("mask") is not None else func(*args, **kwargs)

    model = model.clone()
    model.model_options["transformer_options"][SLOT] = greedy
    sample(model)
    assert accelerator.report()["counts"]["calls"] == 0
    assert "no attention call reached this node" in sent[-1][0]


@pytest.mark.parametrize("ours_first", [True, False], ids=["ours first", "theirs first"])
def test_2000_model_calls_beside_a_foreign_reinstaller(wan, ours_first):
    """A foreign node that takes the slot before every model call and chains blindly, out of our sight."""
    hidden = {}

    def foreign(patcher, timestep, model_options):
        options = model_options["transformer_options"]
        if options.get(SLOT) is not hidden.get("mine"):
            key = len(hidden)
            hidden[key] = options.get(SLOT)
            hidden["mine"] = lambda func, *a, **k: sys.modules["hidden_overrides"].store[key](func, *a, **k)
            options[SLOT] = hidden["mine"]

    module = sys.modules["hidden_overrides"] = types.ModuleType("hidden_overrides")
    module.store = hidden
    try:
        model = wan.clone()
        if not ours_first:
            model.add_callback(CallbacksMP.ON_PREPARE_STATE, foreign)
        model, accelerator = accelerated(model)
        if ours_first:
            model.add_callback(CallbacksMP.ON_PREPARE_STATE, foreign)
        run_options = {"transformer_options": dict(model.model_options["transformer_options"])}
        model.pre_run()
        for _ in range(2000):
            model.prepare_state(torch.ones(1), run_options)
        attend(run_options["transformer_options"], 8, 24)
        attend(run_options["transformer_options"], 8, 24, mask=torch.zeros(8, 24))
        model.cleanup()
    finally:
        del sys.modules["hidden_overrides"]
    counts = accelerator.report()["counts"]
    assert counts["accelerated"] == 1 and counts["passed_on"] == {"the call carries a mask": 1}


def test_the_later_of_two_accelerators_wins(wan, plain):
    first, earlier = accelerated(wan, node_id="1")
    second, later = accelerated(first, "off", node_id="2")
    assert torch.equal(sample(second), plain)
    assert later.report()["counts"]["calls"] == 2 * LAYERS * STEPS and earlier.report()["counts"]["calls"] == 0
    assert later.report()["notes"] == ["the earlier Attention Accelerator (node 1) does not act on this model: the later one wins"]
    for kind in (CallbacksMP.ON_PRE_RUN, CallbacksMP.ON_PREPARE_STATE, CallbacksMP.ON_CLEANUP):
        assert len(second.get_callbacks(kind, KEY)) == 1
    sample(first)
    assert earlier.report()["counts"]["accelerated"] == 2 * LAYERS * STEPS, "the first still acts where it is the last"


def test_the_later_accelerator_wins_with_another_override_between(wan, plain):
    first, earlier = accelerated(wan, node_id="1")
    first.model_options["transformer_options"][SLOT] = counting(first.model_options["transformer_options"][SLOT])
    second, later = accelerated(first, "off", node_id="2")
    assert torch.equal(sample(second), plain)
    assert earlier.override.counts.total == 0 and later.override.counts.total == 2 * LAYERS * STEPS


def test_the_plan_before_the_first_call_and_the_counts_after(wan, sent):
    model, accelerator = accelerated(wan, node_id="17")
    order = []
    mine = model.model_options["transformer_options"][SLOT]
    model.model_options["transformer_options"][SLOT] = lambda func, *a, **k: (order.append(len(sent)), mine(func, *a, **k))[1]
    sample(model)
    assert [node for _, node in sent] == ["17", "17"]
    assert set(order) == {1}, "the plan is on the node before the first attention call"
    before, after = (text for text, _ in sent)
    assert before.startswith("attention: auto → torch (the fastest that auto takes for float32 and head_dim 128 on cpu; not flash-attn-4: ")
    assert "calls: " not in before and f"calls: {2 * LAYERS * STEPS}\n" in after
    for name in names("attention"):
        assert name in before


def test_a_cached_node_reports_every_run_with_fresh_counts(wan, sent):
    """The node's output is reused in the next prompt: execute does not run again, the callbacks do."""
    model, accelerator = accelerated(wan, node_id="17")
    for run in range(3):
        sample(model.clone())
        assert len(sent) == 2 * (run + 1)
        assert accelerator.report()["counts"]["calls"] == 2 * LAYERS * STEPS


def test_counts_are_sent_after_an_interrupt(wan, sent):
    model, accelerator = accelerated(wan, node_id="17")

    def interrupt(func, *args, **kwargs):
        raise KeyboardInterrupt

    accelerator.override.base = interrupt
    accelerator.override.request = AttentionRequest("off")
    with pytest.raises(KeyboardInterrupt):
        sample(model)
    assert len(sent) == 2 and "calls: 1\n" in sent[-1][0]


def test_a_row_that_fails_while_running_is_in_the_report(wan, plain, monkeypatch):
    load = dispatch.Impl.load

    def broken(q, k, v, *, problem):
        raise RuntimeError("no kernel image is available")

    monkeypatch.setattr(dispatch.Impl, "load", lambda self: broken if self.name == "torch" else load(self))
    model, accelerator = accelerated(wan)
    assert torch.equal(sample(model), plain), "nothing else is automatic on a CPU, so ComfyUI's own computes it"
    report = accelerator.report()
    assert report["effective"] == HOST
    assert report["rows"]["torch"] == "failed on this machine with RuntimeError: no kernel image is available"
    assert "no kernel image is available" in report["why"]


def test_no_model_is_kept_alive(wan):
    model, accelerator = accelerated(wan)
    sample(model)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
    assert accelerator.report()["counts"]["calls"] == 2 * LAYERS * STEPS


def test_clones_carry_the_accelerator(wan):
    model, accelerator = accelerated(wan)
    assert model.clone().get_attachment("longlive_accelerator") is accelerator
    assert json.loads(json.dumps(accelerator.report())) == accelerator.report()
    assert set(accelerator.report()) >= {"requested", "effective", "why", "counts", "rows", "notes", "node_id"}


# The node itself


def test_schema():
    schema = LongLiveAttentionAccelerator.GET_SCHEMA()
    assert (schema.node_id, schema.display_name) == ("LongLiveAttentionAccelerator", "Attention Accelerator")
    by_id = {item.id: item for item in schema.inputs}
    assert list(by_id) == ["model", "attention", "implementation"]
    assert all(item.tooltip for item in schema.inputs)
    assert by_id["implementation"].options == ["auto", *names("attention")] and by_id["implementation"].advanced
    parameters = set(inspect.signature(LongLiveAttentionAccelerator.execute).parameters)
    assert set(by_id) <= parameters


def test_execute_shows_the_plan(wan, plain):
    output = LongLiveAttentionAccelerator.execute(wan)
    (shown,) = output.ui.as_dict()["text"]
    assert shown.startswith("attention: auto → torch (")
    assert "flash-attn-4: runs on sm_90, sm_100" in shown and "reference: can run here" in shown
    torch.testing.assert_close(sample(output.args[0]), plain, rtol=1e-4, atol=1e-4)


def test_a_name_has_no_effect_while_off_and_the_node_says_so(wan):
    output = LongLiveAttentionAccelerator.execute(wan, attention="off", implementation="reference")
    assert 'implementation "reference" has no effect while attention is off' in output.ui.as_dict()["text"][0]
    assert output.args[0].get_attachment(KEY).override.request.is_off


def test_execute_refuses_a_name_that_cannot_run(wan):
    with pytest.raises(dispatch.NoImplementation, match='"cudnn" cannot compute .* this device is cpu; what can run here: torch, reference'):
        LongLiveAttentionAccelerator.execute(wan, implementation="cudnn")


def test_validate_inputs():
    validate = LongLiveAttentionAccelerator.validate_inputs
    assert validate() is True and validate("off", "cudnn") is True and validate("auto", "reference") is True
    assert validate("fastest", "auto") == 'attention "fastest" is unknown to this version; it can be auto or off'
    assert validate("auto", "sage") == f'implementation "sage" is unknown to this version; it can be auto, {", ".join(names("attention"))}'
    assert validate("off", "sage").startswith('implementation "sage" is unknown')
    assert "this device is cpu" in validate("auto", "cudnn")


def test_nominal_problem_reads_the_model(wan):
    problem = nominal_problem(wan)
    assert (problem.heads, problem.head_dim, problem.dtype, problem.device) == (2, 128, torch.float32, "cpu")
    assert (nominal_problem().heads, nominal_problem().k_len) == (24, 28160)
