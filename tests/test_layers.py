"""The shape of the house, read from the source: imports go down only, files stay short, one module reads settings."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "manus_fast"

# From the ground up. A part may import from lower rows and from itself, never from its own row or above.
LAYERS = [
    {"_C"},
    {"ops", "process"},
    {"modeling"},
    {"agent", "envs"},
    {"rewards", "data"},
    {"rollout"},
    {"search"},
    {"learn", "evaluate"},
    {"run_config"},
    {"player"},
    {"trainer", "finetune", "teacher", "serving"},
    {"preference", "rounds"},
    {"demo", "expert_iteration", "preference_rounds", "search_trainer"},
    {"info"},
    {"commands"},
    {"cli"},
    {"__main__"},
]
# Anybody may use these; they use nothing but each other.
LEAVES = {
    "config",
    "checkpoint",
    "files",
    "paths",
    "tracking",
    "progress",
    "profile",
    "settings",
    "errors",
    "versions",
    "ranks",
    "launch",
    "plan",
    "run_folder",
}
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}

MODULES = sorted(PACKAGE.rglob("*.py"))
SOURCES = sorted(
    path
    for folder in ("manus_fast", "csrc", "benchmarks", "tests")
    for path in (ROOT / folder).rglob("*")
    if path.suffix in (".py", ".cpp", ".h", ".cu", ".cuh")
)


def part(dotted):
    """manus_fast.learn.losses → learn; manus_fast itself → ""."""
    words = dotted.split(".")
    return words[1] if len(words) > 1 else ""


def imports(path):
    """Dotted names of manus_fast modules that a file imports, at any depth, type-checking blocks left out."""
    own = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    package = own.removesuffix(".__init__") if path.name == "__init__.py" else own.rpartition(".")[0]
    found = []

    def visit(node):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            for child in node.orelse:
                visit(child)
            return
        if isinstance(node, ast.Import):
            found.extend(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                words = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*words, base]) if base else ".".join(words)
            # `from manus_fast import ops` names a part, `from manus_fast.ops import gae` something in it.
            found.extend(f"{base}.{alias.name}" for alias in node.names)
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(ast.parse(path.read_text()))
    return [name for name in found if name.split(".")[0] == "manus_fast"]


def forbidden(own, other):
    """Why part `own` may not import from part `other`, or None."""
    if own == other or other in LEAVES or other in ("__version__", "_C"):  # the core lies beneath all
        return None
    if own in LEAVES:
        return f"the leaf {own} may only use leaves, not {other}"
    if other not in LEVEL:
        return f"{other!r} has no place in the layers"
    if own not in LEVEL:
        return f"{own!r} has no place in the layers"
    return None if LEVEL[other] < LEVEL[own] else f"{own} may not import from {other}: imports go down only"


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_go_down_only(path):
    own = part(".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"))
    problems = [
        f"{name}: {reason}"
        for name in imports(path)
        if own and part(name) and (reason := forbidden(own, part(name))) is not None
    ]
    assert not problems


def test_the_root_imports_nothing():
    assert imports(PACKAGE / "__init__.py") == []


def test_the_walk_sees_every_kind_of_import(tmp_path, monkeypatch):
    """The check itself: what it must catch, it catches."""
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    file = tmp_path / "manus_fast" / "ops" / "x.py"
    file.parent.mkdir(parents=True)
    file.write_text(
        "from typing import TYPE_CHECKING\nimport manus_fast.learn.sft\n"
        "from ..agent import context\nfrom . import gae\n"
        "if TYPE_CHECKING:\n    from manus_fast.cli import app\n"
        "def f():\n    from manus_fast import trainer\n    import torch\n"
    )
    assert imports(file) == [
        "manus_fast.learn.sft", "manus_fast.agent.context", "manus_fast.ops.gae", "manus_fast.trainer",
    ]  # fmt: skip
    assert forbidden("ops", "learn") and forbidden("config", "ops") and forbidden("learn", "evaluate")
    assert forbidden("ops", "nowhere") and forbidden("nowhere", "ops")
    assert forbidden("learn", "ops") is None and forbidden("ops", "config") is None


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_file_is_longer_than_500_lines(path):
    assert len(path.read_text().splitlines()) <= 500


def test_one_module_reads_our_environment_variables():
    readers = set()
    for path in [*MODULES, *(ROOT / "benchmarks").rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            text = node.value if isinstance(node, ast.Constant) else None
            if isinstance(text, str) and re.fullmatch(r"MANUS_FAST_[A-Z0-9_]*", text):
                readers.add(str(path.relative_to(ROOT)))
    assert readers == {"manus_fast/settings.py"}


def test_the_native_core_reads_no_environment_variables():
    assert [path for path in SOURCES if path.suffix != ".py" and "getenv" in path.read_text()] == []


def test_pybind11_and_torch_stay_out_of_the_native_core():
    """Only the bindings see Python; nothing sees torch: the core builds and is tested alone."""
    for path in SOURCES:
        if path.suffix == ".py":
            continue
        includes = re.findall(r"#include\s*[<\"]([^>\"]+)", path.read_text())
        assert not any(name.startswith(("torch/", "ATen/", "c10/")) for name in includes), path
        if not path.name.startswith("bindings"):
            assert not any(name.startswith("pybind11/") or name == "Python.h" for name in includes), path


def test_every_setting_is_documented():
    text = (PACKAGE / "settings.py").read_text()
    named = set(re.findall(r'"(MANUS_FAST_[A-Z_]+)"', text))
    described = set(re.findall(r"^(MANUS_FAST_[A-Z_]+) ", ast.get_docstring(ast.parse(text)), re.M))
    assert named and named == described
