"""Imports point down only: kernels <- accel <- nodes; ComfyUI is known in nodes/ alone; kernels/ loads nothing heavy."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

LAYERS = ("kernels", "accel", "nodes")  # each may import itself and what is left of it
HOST = {"comfy", "comfy_api", "comfy_execution", "comfy_extras", "folder_paths", "latent_preview", "node_helpers", "server"}
OPTIONAL = {"cutlass", "cuda", "flash_attn", "quack", "triton", "tvm_ffi", "comfy_kitchen"}


def imports(path: Path, *, at_module_level: bool = False) -> Iterator[tuple[int, str]]:
    """(dots, dotted name) of every import in a file, or only of those that run when it is imported."""
    todo: list[ast.AST] = [ast.parse(path.read_text(encoding="utf-8"))]
    while todo:
        node = todo.pop()
        if isinstance(node, ast.Import):
            yield from ((0, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            if node.module is None:
                yield from ((node.level, alias.name) for alias in node.names)
            else:
                yield node.level, node.module
        if not (at_module_level and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)):
            todo.extend(ast.iter_child_nodes(node))


def layer_of(path: Path, checkout: Path, dots: int, name: str) -> str | None:
    """The layer that a relative import reaches, None for an absolute one."""
    if dots == 0:
        return None
    folder = path.parent
    for _ in range(dots - 1):
        folder = folder.parent
    assert folder == checkout or checkout in folder.parents, f"{path}: an import of {dots} dots leaves the package"
    target = (folder.relative_to(checkout).parts + tuple(name.split(".")))[0]
    return target if target in LAYERS else None


def sources(checkout: Path, layer: str) -> list[Path]:
    found = sorted((checkout / layer).rglob("*.py"))
    assert found, f"no source in {layer}/"
    return found


@pytest.mark.parametrize("layer", LAYERS)
def test_imports_point_down_only(checkout, layer):
    allowed = LAYERS[: LAYERS.index(layer) + 1]
    for path in sources(checkout, layer):
        for dots, name in imports(path):
            target = layer_of(path, checkout, dots, name)
            assert target is None or target in allowed, f"{path.relative_to(checkout)} imports {target}/ from {layer}/"
            assert dots or name.split(".")[0] not in LAYERS, f"{path.relative_to(checkout)} imports {name} by its bare name"


@pytest.mark.parametrize("layer", ["kernels", "accel"])
def test_only_nodes_know_comfyui(checkout, layer):
    for path in sources(checkout, layer):
        known = {name.split(".")[0] for dots, name in imports(path) if dots == 0} & HOST
        assert not known, f"{path.relative_to(checkout)} imports {', '.join(sorted(known))}"


@pytest.mark.parametrize("layer", ["kernels", "accel"])
def test_optional_packages_are_imported_inside_the_function_that_needs_them(checkout, layer):
    for path in sources(checkout, layer):
        heavy = {name.split(".")[0] for dots, name in imports(path, at_module_level=True) if dots == 0} & OPTIONAL
        assert not heavy, f"{path.relative_to(checkout)} imports {', '.join(sorted(heavy))} at module level"


def test_the_checks_above_can_fail(tmp_path):
    package = tmp_path / "kernels"
    package.mkdir()
    bad = package / "bad.py"
    bad.write_text("import cutlass\nfrom ..accel import plan\nfrom .. import nodes\ndef f():\n    import comfy.utils\n")
    assert {layer_of(bad, tmp_path, *found) for found in imports(bad)} == {None, "accel", "nodes"}
    assert (0, "comfy.utils") in set(imports(bad))
    assert (0, "comfy.utils") not in set(imports(bad, at_module_level=True))
    assert (0, "cutlass") in set(imports(bad, at_module_level=True))
