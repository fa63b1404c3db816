"""The rings of the package: what may import what, and what a user of the core alone needs."""

import ast
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parent.parent
PACKAGE = ROOT / "jagg_jax"
FILES = sorted(PACKAGE.rglob("*.py"))
CORE = {"jagg_jax", *(f"jagg_jax.{path.stem}" for path in PACKAGE.glob("*.py"))} - {
    "jagg_jax.__init__",
    "jagg_jax.update",
}


def module_name(path: pathlib.Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(path: pathlib.Path) -> set[str]:
    """All modules a file imports, anywhere in it; `from a import b` counts as a and as a.b."""
    found = set()
    package = path.relative_to(ROOT).parent.parts
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            module = ".".join(part for part in (base, node.module) if part)
            found.add(module)
            found.update(f"{module}.{alias.name}" for alias in node.names)
    return found


def external(path: pathlib.Path) -> set[str]:
    """Top-level names that come neither with Python nor with this package."""
    return {name.split(".")[0] for name in imports(path)} - set(sys.stdlib_module_names) - {"jagg_jax", "configs"}


def internal(path: pathlib.Path) -> set[str]:
    """This package's modules that a file imports (names inside a module are dropped)."""
    modules = {module_name(file) for file in FILES}
    return {name for name in imports(path) if name in modules}


def test_the_core_needs_jax_and_itself():
    for path in PACKAGE.glob("*.py"):
        allowed = {"jax", "numpy", "optax"} if path.stem == "update" else {"jax", "numpy"}
        assert external(path) <= allowed, path.name
        assert internal(path) <= CORE, path.name


@pytest.mark.parametrize("ring", ["models", "rewards", "prompts"])
def test_nothing_below_imports_the_trainer(ring):
    paths = sorted((PACKAGE / ring).rglob("*.py"))
    assert paths
    for path in paths:
        above = {name for name in imports(path) if name.startswith(("jagg_jax.training", "jagg_jax.update", "configs"))}
        assert not above, path


def test_only_the_encoding_of_prompts_imports_pytorch():
    for path in [*FILES, *(ROOT / "configs").glob("*.py"), ROOT / "train.py"]:
        allowed = {"torch", "transformers"} if path == PACKAGE / "prompts" / "encode.py" else set()
        assert external(path) & {"torch", "diffusers", "transformers", "tensorflow"} == allowed, path
        if path != PACKAGE / "training" / "encode_prompts.py":
            assert "jagg_jax.prompts.encode" not in internal(path), path


def test_imports_go_one_way():
    """No module of the core is imported, however indirectly, by one it imports."""
    edges = {module_name(path): internal(path) - {module_name(path)} for path in PACKAGE.glob("*.py")}
    edges.pop("jagg_jax")
    order = []
    while edges:
        free = sorted(name for name, needs in edges.items() if not (needs & edges.keys()))
        assert free, f"a cycle among {sorted(edges)}"
        order += free
        for name in free:
            del edges[name]
    assert order.index("jagg_jax.plans") < order.index("jagg_jax.backward") < order.index("jagg_jax.update")


def test_only_the_trainer_reads_the_environment():
    """Neither environment variables nor a mesh below training."""
    for path in FILES:
        if "training" in path.relative_to(PACKAGE).parts:
            continue
        used = {node.attr for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)}
        assert not used & {"environ", "getenv", "make_mesh", "set_mesh"}, path


PROGRAM = """
import importlib, sys, sysconfig
import jax, numpy

class RefuseWhatTheTrainerNeeds:
    def find_spec(self, name, path=None, target=None):
        refused = {"flax", "optax", "orbax", "tyro", "chex", "torch", "diffusers", "rich", "matplotlib", "PIL"}
        if name.split(".")[0] in refused:
            raise ImportError(name + " is refused")

def installed():
    site = sysconfig.get_paths()["purelib"]
    files = {name: getattr(module, "__file__", None) or "" for name, module in list(sys.modules.items())}
    return {name.split(".")[0] for name, file in files.items() if file.startswith(site)}

sys.meta_path.insert(0, RefuseWhatTheTrainerNeeds())
before = installed()
for name in sys.argv[1].split(","):
    importlib.import_module(name)
import jagg_jax
assert all(hasattr(jagg_jax, name) for name in jagg_jax.__all__)
print("loaded beyond JAX:", *sorted(installed() - before))
try:
    import jagg_jax.update
except ImportError as error:
    print(error)
"""


WITHOUT_PYTORCH = """
import importlib, sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"torch", "diffusers", "transformers", "tensorflow"}:
            raise ImportError(name + " is refused")

sys.meta_path.insert(0, Refuse())
for name in sys.argv[1].split(","):
    importlib.import_module(name)
"""


def test_everything_but_the_encoding_of_prompts_works_without_pytorch():
    """In a fresh interpreter that refuses it: tensorboardX would load it where it's installed, and needs it nowhere."""
    names = ",".join(module_name(path) for path in FILES if path != PACKAGE / "prompts" / "encode.py")
    command = [sys.executable, "-c", WITHOUT_PYTORCH, names]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=300, check=False)
    assert result.returncode == 0, result.stderr


def test_the_core_imports_with_jax_and_numpy_alone():
    """In a fresh interpreter that refuses what the trainer needs; nothing is loaded that JAX had not loaded already."""
    command = [sys.executable, "-c", PROGRAM, ",".join(sorted(CORE))]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=300, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == ["loaded beyond JAX:", "optax is refused"]
