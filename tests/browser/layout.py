"""Where the nodes of the shipped workflows stand, in which groups, and what the notes beside them say. The API files hold no places and no notes.

``place`` puts a workflow that is open in the frontend in order: stacks from left to right, groups in a stack from top to bottom, columns inside a group from
left to right.
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass

from .frontend import Frontend

BLUE, GREEN, VIOLET, ORANGE, GREY = "#3f5f8a", "#3f7a55", "#6a4f8a", "#8a6a3f", "#555555"


@dataclass(frozen=True)
class Item:
    """A node of the API file, by its id. ``width`` and ``height`` are the least it gets, ``report`` is kept free for the text it shows after
    a run, ``above`` and ``indent`` are kept free above it and to
    its left (pixels)."""

    node: str
    width: int = 340
    height: int = 0
    report: int = 0
    above: int = 0
    indent: int = 0


@dataclass(frozen=True)
class Note:
    """A note for people, as core's MarkdownNote."""

    title: str
    text: str
    width: int = 480
    height: int = 300


@dataclass(frozen=True)
class Group:
    title: str
    columns: tuple[tuple[Item | Note, ...], ...]
    color: str = GREY


Stack = tuple[Group, ...]

# Makes the notes, sizes and places everything, and draws the groups.
_PLACE = """(stacks) => {
    const gap = 40, title = 30, pad = 20, head = 40, between = 40;
    const byId = new Map(app.graph.nodes.map(n => [String(n.id), n]));
    const make = item => {
        if (item.node !== undefined) {
            const node = byId.get(item.node);
            const size = node.computeSize();
            node.setSize([Math.max(size[0], item.width), Math.max(size[1] + item.report, item.height)]);
            return node;
        }
        const note = LiteGraph.createNode('MarkdownNote');
        note.title = item.title;
        app.graph.add(note);
        note.widgets[0].value = item.text;
        note.setSize([item.width, item.height]);
        return note;
    };
    let x = 0;
    const edges = [], bottoms = [], stackOf = new Map();
    for (const [index, stack] of stacks.entries()) {
        const boxes = [];
        let y = 0, right = x;
        for (const group of stack) {
            let left = x + pad, bottom = y;
            for (const column of group.columns) {
                let top = y + head + title, width = 0;
                for (const item of column) {
                    const node = make(item);
                    top += item.above || 0;
                    node.pos = [left + (item.indent || 0), top];
                    bottom = Math.max(bottom, top + node.size[1]);
                    top += node.size[1] + title + gap;
                    width = Math.max(width, (item.indent || 0) + node.size[0]);
                    stackOf.set(node.id, index);
                }
                left += width + gap;
            }
            right = Math.max(right, left - gap + pad);
            boxes.push([group, y, bottom + pad]);
            y = bottom + pad + between;
        }
        for (const [group, top, bottom] of boxes) {
            const box = new LiteGraph.LGraphGroup(group.title);
            box.color = group.color;
            box.pos = [x, top];
            box.size = [right - x, bottom - top];
            app.graph.add(box);
        }
        bottoms.push(y - between);
        edges.push([x - between / 2, right + between / 2]);
        x = right + between;
    }
    // A link over a whole stack goes above everything, one lane per output, or below what is in between, instead of behind it.
    const lanes = new Map();
    for (const link of [...app.graph.links.values()]) {
        const from = stackOf.get(link.origin_id), to = stackOf.get(link.target_id);
        if (to - from < 2) continue;
        const source = app.graph.getNodeById(link.origin_id).getOutputPos(link.origin_slot);
        const output = `${link.origin_id}.${link.origin_slot}`;
        const low = Math.max(...bottoms.slice(from + 1, to));
        if (!lanes.has(output)) lanes.set(output, source[1] > low ? source[1] : -20 - 22 * lanes.size);
        const lane = lanes.get(output);
        app.graph.createReroute([edges[from][1], lane], link);
        app.graph.createReroute([edges[to][0], lane], link);
    }
    app.graph.setDirtyCanvas(true, true);
}"""


def place(frontend: Frontend, name: str) -> None:
    """Lay out the open workflow as LAYOUTS says. Every node of it must have a place there."""
    stacks = LAYOUTS[name]
    items = [item for stack in stacks for group in stack for column in group.columns for item in column]
    placed = sorted(item.node for item in items if isinstance(item, Item))
    there = sorted(frontend.prompt())
    if placed != there:
        raise ValueError(f"layout of {name}: it places the nodes {placed}, and the workflow has {there}")
    frontend.page.evaluate(_PLACE, [[asdict(group) for group in stack] for stack in stacks])
    frontend.page.wait_for_timeout(300)


def _files(*rows: tuple[str, str, str]) -> str:
    """Files, the folders they belong into, and the page each comes from."""
    return "\n".join(f"- **{file}** into `models/{folder}`, from [{site}](https://huggingface.co/{site})" for file, folder, site in rows)


_UMT5 = ("umt5_xxl_fp8_e4m3fn_scaled.safetensors", "text_encoders", "Comfy-Org/Wan_2.1_ComfyUI_repackaged")
_FILES_2 = _files(
    ("model_bf16.pt", "diffusion_models", "Efficient-Large-Model/LongLive-2.0-5B"),
    _UMT5,
    ("wan2.2_vae.safetensors", "vae", "Comfy-Org/Wan_2.2_ComfyUI_Repackaged"),
)
_FILES_1 = _files(
    ("longlive_base.pt", "diffusion_models", "Efficient-Large-Model/LongLive-1.3B"),
    ("lora.pt", "loras", "Efficient-Large-Model/LongLive-1.3B"),
    _UMT5,
    ("wan_2.1_vae.safetensors", "vae", "Comfy-Org/Wan_2.1_ComfyUI_repackaged"),
)


def _read_me(files: str, text: str, height: int) -> Stack:
    start = f"### 1. Files\n\n{files}\n\nPut them there and press **R**, so that the loaders find them. "
    start += "While one is missing, its loader has a red frame; **View details** at the top right offers the downloads.\n\n### 2. Run\n\n"
    # A line break of this file is none in the note; one before a list or heading is.
    text = re.sub(r"(?<!\n)\n(?![\n#-])", " ", text)
    return (Group("Read me first", ((Note("Start here", start + text, height=height),),)),)


_MODEL = Group("Model", ((Item("1", 360, report=250),), (Item("4", 360, report=300),)), BLUE)
_SAMPLER = Item("7", 400, report=280)
_LATENT = Group("Size and length", ((Item("6", 520, report=190, indent=420),),), GREEN)
_DECODE = Group("Decode into a file", ((Item("3", 300, above=110),), (Item("8", 440, 720),)), ORANGE)


def _text(height: int) -> Group:
    return Group("Text", ((Item("2", 380),), (Item("5", 520, height),)), GREEN)


def _sample(*items: Item) -> Stack:
    return (Group("Sample chunk by chunk", (items,), VIOLET),)


LAYOUTS: dict[str, tuple[Stack, ...]] = {
    "text_to_video_longlive2": (
        _read_me(
            _FILES_2,
            """Press **Run**. The nodes write what they do onto themselves. At the end the video (5 seconds, 1280x704) appears on **VAE Stream Decode**;
it lies in `ComfyUI/output/video`.

### 3. Your own video

- Describe it in **Prompt**: who, what, clothes, place, light, camera, in the present tense, about 200 words. Short prompts are the most common reason for poor
results.
- Set its length with `seconds` on **Empty LongLive Latent**. Time grows with it, memory does not.
- `0`, `-1` and `auto` on the **Chunked Sampler** mean: as the model was made. Leave them.
""",
            580,
        ),
        (_MODEL, _text(400), _LATENT),
        _sample(_SAMPLER),
        (_DECODE,),
    ),
    "timeline_with_cut_longlive2": (
        _read_me(
            _FILES_2,
            """Press **Run**. You get 10.5 seconds in two shots; the second begins after 5 seconds.

### 3. Your own shots

- A line `0:05 cut ...` begins a new shot at 5 seconds. The lines below it belong to it.
- Prompts change at the start of a chunk (8 latent frames, 1.3 seconds). After a run **Prompt Timeline** shows where each change really is.
- Describe people and places again in every shot, in the same words. The model sees the start of the video and of the shot, not your intention.
- The sampler keeps the first chunk of the video and the first chunk of the shot in view.
""",
            590,
        ),
        (_MODEL, _text(700), _LATENT),
        _sample(_SAMPLER),
        (_DECODE,),
    ),
    "start_image_longlive2": (
        _read_me(
            _FILES_2,
            """Press **Run**. The start image is put together from coloured rectangles, so that no picture is missing.

### 3. Your own picture

- Add **Load Image** and connect it to `start_image` of **Start image to latent**. Delete the nodes that draw.
- The picture is scaled to the size of the video; crop it to 1280x704 (20:11) before.
- Describe in **Prompt** what the picture shows and what shall happen.
- `length` is in frames: 125 frames are 5.2 seconds.

LongLive 2.0 was trained on text only. A start image works because Wan 2.2 can do it; expect less quality than from text.
""",
            630,
        ),
        (
            _MODEL,
            _text(330),
            Group(
                "Start image",
                (
                    (Item("9", 230), Item("10", 230)),
                    (Item("11", 230), Item("12", 230)),
                    (Item("13", 260), Item("14", 260)),
                    (Item("15", 340, 330),),
                    (Item("3", 330), Item("6", 330)),
                ),
                GREEN,
            ),
        ),
        _sample(_SAMPLER),
        (Group("Decode into a file", ((Item("8", 440, 640),),), ORANGE),),
    ),
    "save_resume_extend_longlive2": (
        _read_me(
            _FILES_2,
            """Press **Run**. Three parts are made one after the other:

- **Part 1**: 5.2 seconds. Its *state* is saved to `ComfyUI/output/longlive_states`.
- **Part 2** loads that file and goes on for 2.5 seconds.
- **Part 3** goes on from the *latents* of part 2, without a state.

Each sampler gives out the whole video so far, so the last decoder holds all three parts.

### 3. On another day

Disconnect `path` of **Load LongLive State** and pick the saved file in its list; part 1 need not run again (select its nodes, Ctrl+M).

`keep_state`: *light* saves a few MB, and keys and values are rebuilt: close to one long run, not equal to it. *exact* continues bit for bit and needs 10.4 GB
of memory and disk.

Model and size must stay the same.
""",
            820,
        ),
        (_MODEL, Group("Text and video coding", ((Item("2", 360), Item("3", 360)),), GREEN)),
        (
            Group("Part 1: text and length", ((Item("5", 400, 280), Item("6", 400, report=190)),), GREEN),
        ),
        (Group("Part 1: make and save", ((Item("7", 400, report=240),), (Item("9", 420, report=130), Item("8", 420, 640))), VIOLET),),
        (
            Group("Part 2: load, text, length", ((Item("10", 400, report=170), Item("11", 400, 280), Item("12", 400, report=190)),), GREEN),
        ),
        (Group("Part 2: resume", ((Item("13", 400, report=280),),), VIOLET),),
        (Group("Part 3: extend", ((Item("14", 400, report=280),), (Item("15", 440, 700),)), ORANGE),),
    ),
    "accelerator_comparison_longlive2": (
        _read_me(
            _FILES_2,
            """Press **Run**. The same video (2.5 seconds, same seed) is made twice: with ComfyUI's own attention, and with the best one that this machine has.

### 3. What to look at

- The two **Accelerator** nodes say what was asked, what ran, why, and how many calls there were.
- The two videos look alike. Small differences are normal: another implementation rounds differently.
- For times, see the durations in ComfyUI's log; run twice, since the first run also loads the model.
""",
            500,
        ),
        (
            Group("Model, with the accelerator off and on", ((Item("1", 380, report=250),), (Item("4", 520, report=330), Item("9", 520, report=330))), BLUE),
            _text(330),
            _LATENT,
        ),
        (
            Group("Sample, accelerator off", ((Item("7", 400, report=280),),), VIOLET),
            Group("Sample, accelerator auto", ((Item("10", 400, report=280),),), VIOLET),
        ),
        (Group("Decode into files", ((Item("3", 300, above=700),), (Item("8", 440, 720), Item("11", 440, 720, above=70))), ORANGE),),
    ),
    "prompt_switch_longlive1": (
        _read_me(
            _FILES_1,
            """Press **Run**. You get 9.5 seconds at 832x480 with 16 frames per second; the dog gets up after 5 seconds.

### 3. Your own text

- A line `0:05 switch ...` changes the prompt inside the shot. The sampler then reads the frames in its window again under the new prompt.
- LongLive 1.0 has no cuts: write `switch`, not `cut`.
- **Load LongLive DiT** merges the LoRA into the base while loading. Both files are needed.
- Prompts change at the start of a chunk (3 latent frames, 0.75 seconds). After a run **Prompt Timeline** shows where.
""",
            650,
        ),
        (_MODEL, _text(600), _LATENT),
        _sample(_SAMPLER),
        (_DECODE,),
    ),
}

# The nodes that the thumbnail shows; the whole graph where nothing is said.
PICTURES: dict[str, tuple[str, ...]] = {
    "text_to_video_longlive2": ("5",),
    "timeline_with_cut_longlive2": ("5",),
    "start_image_longlive2": ("13", "14", "15"),
    "save_resume_extend_longlive2": ("9", "8", "10", "12"),
    "prompt_switch_longlive1": ("5",),
}
