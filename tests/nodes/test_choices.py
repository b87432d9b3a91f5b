"""A value that is not on offer is refused in a sentence, by every node and both ways it can come in."""

import inspect

import pytest
from comfy_api.latest import io
from longlive.nodes.choices import unknown_choice
from longlive.nodes.extension import NODES

# Lists of files are core's to check: it names the file that is missing.
FILES = {"dit_name", "adapter", "file"}
CASES = [(node, choice.id) for node in NODES for choice in node.define_schema().inputs if isinstance(choice, io.Combo.Input) and choice.id not in FILES]


def test_there_are_choices_to_check():
    assert len(CASES) >= 12


@pytest.mark.parametrize(("node", "name"), CASES, ids=lambda value: value if isinstance(value, str) else value.define_schema().node_id)
def test_every_combo_refuses_what_it_does_not_know(node, name):
    assert name in inspect.signature(node.validate_inputs).parameters, "core would answer with its bare list"
    answer = node.validate_inputs(**{name: "something else"})
    assert isinstance(answer, str) and "something else" in answer and name in answer
    assert node.validate_inputs() is True


def test_the_sentence_names_what_was_asked_and_what_would_work():
    assert unknown_choice(("speed", "fast", ("fast", "exact"))) is None
    assert unknown_choice(("speed", "warp", ("fast", "exact"))) == "speed 'warp' is not known; one of fast, exact would work"
