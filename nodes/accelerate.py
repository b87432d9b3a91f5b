"""The Attention Accelerator node: MODEL → MODEL whose attention calls go through accel.override; it reports what really ran."""

from __future__ import annotations

import logging

import comfy.model_management
import torch
from comfy.patcher_extension import CallbacksMP
from comfy_api.latest import io, ui

from ..accel.override import ACTING, SLOT, AttentionOverride
from ..accel.plan import AttentionRequest, Plan, make_plan
from ..accel.report import Line, Report
from ..kernels.arch import arch_of
from ..kernels.dispatch import NoImplementation, Problem, names, select
from .node_text import send_text

KEY = "longlive_accelerator"  # of the attachment and of the callbacks
TITLE = "Attention Accelerator"
MODES = ("auto", "off")
# Stands in for the model's real calls until one has been seen: LongLive 2.0 at a full window, or head_dim as the model has it.
NOMINAL_LENGTHS = (7040, 28160)


class Accelerator:
    """What an accelerated MODEL carries: the override, who to report to, and the report. Holds no model."""

    def __init__(self, node_id: str | None, override: AttentionOverride, plan: Plan, notes: tuple[str, ...]) -> None:
        self.node_id = node_id
        self.override = override
        self.plan = plan  # as known before any call
        self.notes = notes
        self._has_run = False

    def report(self) -> dict:
        """JSON-able: requested, effective, why, the rows of the table, and the counts of the run under way or just ended."""
        report = self._report()
        line = report.lines[0]
        return {
            "node_id": self.node_id,
            "requested": line.requested,
            "effective": line.effective,
            "why": line.why,
            "rows": self._rows(),
            "counts": self.override.counts.to_dict(),
            "notes": list(report.notes),
        }

    def text(self) -> str:
        """The same for people: the line, the counts, the notes, and why each row that did not compute anything did not."""
        report = self._report()
        used = self.override.counts.implementations() or (self.plan.effective,)
        unused = [f"  {name}: {reason or 'can run here'}" for name, reason in self._rows().items() if name not in used]
        return "\n".join([report.text(), "not used:", *unused])

    def _rows(self) -> dict[str, str | None]:
        return {**self.plan.rows, **self.override.failed}

    def _report(self) -> Report:
        counts = self.override.counts
        notes = list(self.notes)
        if self.override.retakes:
            notes.append(f"another node took the override slot {self.override.retakes} times; it gets what this node passes on")
        if self._has_run and not counts.total:
            notes.append("no attention call reached this node: the model does not offer its calls, or a node in front of this one computes them all")
        return Report(TITLE, (self._line(),), counts.to_dict() if counts.total else {}, tuple(notes))

    def _line(self) -> Line:
        used = self.override.counts.implementations()
        if not used:
            return self.plan.line
        effective = ", ".join(used)
        plans = [plan for plan in self.override.plans.values() if plan.effective in used]
        # The longest window says most: short calls may be planned differently.
        why = max(plans, key=lambda plan: plan.problem.k_len).why if plans else self.plan.why
        passed_on = self.override.counts.to_dict()["passed_on"]
        if plans and passed_on:
            why = f"{why}; passed on {sum(passed_on.values())} calls: {', '.join(passed_on)}"
        return Line("attention", self.plan.requested, effective, why)

    # Patcher callbacks. The patcher that samples is a later clone; it is used, never kept.

    def before_run(self, patcher) -> None:
        self._has_run = False
        self.override.start_run()
        self.show()

    def before_model_call(self, patcher, timestep, model_options: dict) -> None:
        self.override.hold_slot(model_options.setdefault("transformer_options", {}))

    def after_run(self, patcher) -> None:
        self._has_run = True
        self.override.end_run()
        self.show()
        logging.info("%s: %s", TITLE, self._line())

    def show(self) -> None:
        """Put the text on the node, also when the node itself was cached in this prompt."""
        send_text(self.node_id, self.text())


def accelerate(model, request: AttentionRequest, node_id: str | None = None, notes: tuple[str, ...] = ()) -> tuple[object, Accelerator]:
    """A clone of the MODEL whose attention follows the request, and the Accelerator it carries.

    What was in the override slot before gets the calls that are declined. An earlier accelerator on the same MODEL stops acting on the clone.
    Raises NoImplementation when the request names a row that cannot run here.
    """
    problem = nominal_problem(model)
    plan = make_plan(request, problem, arch_of(model.load_device))
    clone = model.clone()
    options = clone.model_options.setdefault("transformer_options", {})
    base, earlier = options.get(SLOT), clone.get_attachment(KEY)
    if earlier is not None:
        notes = (*notes, f"the earlier {TITLE} (node {earlier.node_id}) does not act on this model: the later one wins")
        if base is earlier.override:
            base = earlier.override.base
    if base is not None:
        notes = (*notes, f"calls that are passed on go to the override that was there before: {_name(base)}")
    override = AttentionOverride(request, base)
    accelerator = Accelerator(node_id, override, plan, notes)
    options[SLOT] = override
    options[ACTING] = override
    clone.set_attachments(KEY, accelerator)
    for kind, callback in (
        (CallbacksMP.ON_PRE_RUN, accelerator.before_run),
        (CallbacksMP.ON_PREPARE_STATE, accelerator.before_model_call),
        (CallbacksMP.ON_CLEANUP, accelerator.after_run),
    ):
        clone.remove_callbacks_with_key(kind, KEY)
        clone.add_callback_with_key(kind, KEY, callback)
    return clone, accelerator


def nominal_problem(model=None) -> Problem:
    """A self-attention call as this MODEL will make it, as far as is known before the first one; without a MODEL, LongLive 2.0's."""
    device = comfy.model_management.get_torch_device() if model is None else model.load_device
    heads, head_dim = 24, 128
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    if model is not None:
        network = getattr(model.model, "diffusion_model", None)
        width, count = getattr(network, "dim", None), getattr(network, "num_heads", None)
        if isinstance(width, int) and isinstance(count, int) and count > 0 and width % count == 0:
            heads, head_dim = count, width // count
        if hasattr(model.model, "get_dtype_inference"):
            dtype = model.model.get_dtype_inference()
    q_len, k_len = NOMINAL_LENGTHS
    return Problem(q_len, k_len, heads, head_dim, dtype, device.type)


def _name(override: object) -> str:
    kind = override if hasattr(override, "__qualname__") else type(override)
    return f"{kind.__module__}.{kind.__qualname__}"


class LongLiveAttentionAccelerator(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="LongLiveAttentionAccelerator",
            display_name=TITLE,
            category="LongLive",
            description="Computes the model's attention with the fastest implementation this machine has, in LongLive's cached calls and in any "
            "other model that offers its attention calls. Shows what was asked, what runs and why.",
            search_aliases=["flash attention", "sage attention", "cudnn attention", "attention backend", "longlive attention"],
            inputs=[
                io.Model.Input("model", tooltip="The model whose attention is computed here; Wan, LongLive, or any model that uses core's attention."),
                io.Combo.Input(
                    "attention",
                    options=list(MODES),
                    default="auto",
                    tooltip="auto: the best dense implementation present (flash-attn-4 where installed and supported, else cuDNN, else torch's choice), "
                    "the same result within rounding. off: ComfyUI's own attention, bit for bit; the calls are still counted.",
                ),
                io.Combo.Input(
                    "implementation",
                    options=["auto", *names("attention")],
                    default="auto",
                    advanced=True,
                    tooltip="Which implementation computes it, by name, when attention is not off. One that cannot run here is refused with the reason. "
                    "auto: the fastest, chosen by GPU architecture, dtype and head size; reference is exact float32 and slow, for checking.",
                ),
            ],
            outputs=[io.Model.Output(tooltip="The same model with its attention computed as chosen; an ordinary MODEL for any sampler.")],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def validate_inputs(cls, attention: str = "auto", implementation: str = "auto") -> bool | str:
        """True, or why these values cannot run here. A value that comes over a link is not known yet and keeps its default here."""
        if attention not in MODES:
            return f'attention "{attention}" is unknown to this version; it can be {" or ".join(MODES)}'
        if implementation == "auto":
            return True
        if implementation not in names("attention"):
            return f'implementation "{implementation}" is unknown to this version; it can be {", ".join(("auto", *names("attention")))}'
        if attention != "off":
            try:
                select("attention", nominal_problem(), arch_of(comfy.model_management.get_torch_device()), implementation)
            except NoImplementation as error:
                return str(error)
        return True

    @classmethod
    def execute(cls, model, attention: str = "auto", implementation: str = "auto") -> io.NodeOutput:
        notes = ()
        if attention == "off" and implementation != "auto":
            notes = (f'implementation "{implementation}" has no effect while attention is off',)
        request = AttentionRequest("off" if attention == "off" else implementation)
        clone, accelerator = accelerate(model, request, getattr(cls.hidden, "unique_id", None), notes)
        accelerator.show()
        return io.NodeOutput(clone, ui=ui.PreviewText(accelerator.text()))


NODES = [LongLiveAttentionAccelerator]
