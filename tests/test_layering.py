"""Which package may know which: the hooks are judged by the bench and never know of it."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PRIVATE_NAMES = (
    ROOT / "real" / "mcore" / "internals",
    ROOT / "real" / "targets" / "internals",
)
MEGATRON_FREE = {
    "real.mcore",
    "real.mcore.consumers",
    "real.mcore.validate",
    "real.mcore.versions",
    "real.targets",
    "real.targets.base",
    "real.targets.identity",
    "real.targets.tree",
}
"""Modules of these two packages that import without Megatron: they judge what they are given."""

DOCUMENTED_EXCEPTIONS = {
    # Megatron gives the base class of its data-parallel wrappers no public name.
    ("real/mcore/schedule.py", "_BaseDataParallel"),
    # Torch gives the identity of a storage no public name.
    ("real/gpu/recorder.py", "_cdata"),
}


def sources(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def module_name(path: Path) -> str:
    return relative(path).removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def imports(path: Path) -> Iterator[str]:
    """Yields the full name of everything that a file imports, anywhere in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, (
                f"{relative(path)}:{node.lineno}: expected absolute imports only"
            )
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def within(name: str, *packages: str) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)


def offences(paths: list[Path], *packages: str) -> list[str]:
    return [
        f"{relative(path)} imports {name}"
        for path in paths
        for name in imports(path)
        if within(name, *packages)
    ]


def test_real_never_imports_the_bench() -> None:
    """What is judged must not depend on the judge, not even in a function."""
    assert offences(sources("real"), "sim", "tests") == []


def test_hooks_and_trace_import_neither_megatron_nor_transformer_engine() -> None:
    """They work for any FSDP that gives them units."""
    paths = sources("real/hooks", "real/trace")
    assert offences(paths, "megatron", "transformer_engine", "real.mcore", "real.config") == []


def test_trace_imports_no_torch() -> None:
    """Tools that read a trace start at once."""
    assert offences(sources("real/trace"), "torch") == []


def test_the_bench_never_imports_the_gpu_runner() -> None:
    """It would ask for a GPU."""
    assert offences(sources("sim"), "real.gpu") == []


def run_python(program: str) -> str:
    """Runs a program in a fresh interpreter and returns what it prints."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{program}\n{done.stderr}"
    return done.stdout.strip()


IMPORT_WITHOUT = """
import importlib, sys, torch

# Compiled code is not what is asked here, and loading the compiler takes seconds.
torch.compile = lambda f=None, **_: f or (lambda g: g)
refused = {refused!r}
sys.modules.update(dict.fromkeys(refused))  # as if they were not installed
for name in {names!r}:
    importlib.import_module(name)
print([name for name in refused if sys.modules.get(name)])
"""


def importable() -> list[str]:
    """Names of the modules of `real` that are not commands and need no GPU."""
    names = [module_name(path) for path in sources("real") if path.stem != "__main__"]
    return [name for name in names if not within(name, "real.gpu")]


@pytest.mark.slow
def test_modules_that_need_no_megatron_import_without_it() -> None:
    """Nor do they need Transformer Engine, a GPU, or the bench."""
    names = [
        name
        for name in importable()
        if not (within(name, "real.mcore") or within(name, "real.targets")) or name in MEGATRON_FREE
    ]
    assert {"real", "real.config", "real.hooks.scheduler", *MEGATRON_FREE} <= set(names)
    refused = ["sim", "megatron", "transformer_engine"]
    assert run_python(IMPORT_WITHOUT.format(refused=refused, names=names)) == "[]"


@pytest.mark.slow
def test_every_module_imports_without_transformer_engine_and_without_the_bench() -> None:
    """Megatron itself runs without the one, and nobody has to be a rank to import the hooks."""
    refused = ["sim", "transformer_engine"]
    assert run_python(IMPORT_WITHOUT.format(refused=refused, names=importable())) == "[]"


def identifiers(path: Path) -> Iterator[tuple[int, str]]:
    """Yields every identifier in a file's code; text and comments are left out."""
    for node in ast.walk(ast.parse(path.read_text())):
        for field in ("id", "attr", "name", "arg", "asname"):
            value = getattr(node, field, None)
            if isinstance(value, str):
                yield getattr(node, "lineno", 0), value


def test_no_name_in_real_knows_of_the_bench() -> None:
    """The code that is judged is the code that runs: no branch may tell the two apart."""
    odd = [
        f"{relative(path)}:{line}: {name}"
        for path in sources("real")
        for line, name in identifiers(path)
        if any(word in name.lower() for word in ("simulat", "fake"))
    ]
    assert odd == []


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def root_of(node: ast.expr) -> str:
    """Returns the first name of `a.b.c`, or nothing for the result of a call or an index."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def foreign_private_names(path: Path) -> Iterator[tuple[int, str]]:
    """Yields private names that a file takes from elsewhere, or defines for others to call.

    Its own are those of `self`, of the classes it defines, and its module's. Private names of torch
    are none of Megatron's.
    """
    tree = ast.parse(path.read_text())
    own = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and root_of(node.value) == "self"
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and not within(node.module or "", "torch"):
            yield from ((node.lineno, a.name) for a in node.names if is_private(a.name))
        elif isinstance(node, ast.Attribute) and is_private(node.attr):
            if root_of(node.value) not in ("self", "cls", "torch", "os") and node.attr not in own:
                yield node.lineno, node.attr
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            if node.func.id in ("getattr", "setattr", "hasattr", "delattr"):
                yield from (
                    (node.lineno, str(argument.value))
                    for argument in node.args[1:2]
                    if isinstance(argument, ast.Constant) and is_private(str(argument.value))
                )


def test_private_names_of_megatron_are_touched_in_one_place() -> None:
    """That place is what has to be read again when Megatron's version moves."""
    odd = [
        f"{relative(path)}:{line}: {name}"
        for path in sources("real")
        if not any(folder in path.parents for folder in PRIVATE_NAMES)
        for line, name in foreign_private_names(path)
        if (relative(path), name) not in DOCUMENTED_EXCEPTIONS
    ]
    assert odd == []


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("from megatron.core.x import _Private", ["_Private"]),
        ("module._parameter_groups", ["_parameter_groups"]),
        ("getattr(module, '_context')", ["_context"]),
        ("units()[0]._event", ["_event"]),
        ("self._mine", []),
        ("torch._foreach_norm(x)", []),
        ("module.__dict__", []),
    ],
)
def test_the_search_for_private_names_finds_them(
    tmp_path: Path, code: str, found: list[str]
) -> None:
    """A search that finds nothing proves nothing."""
    path = tmp_path / "code.py"
    path.write_text(code)
    assert [name for _, name in foreign_private_names(path)] == found


# -- packages ---------------------------------------------------------------------------------


def package_of(name: str) -> str:
    """Returns the package, or the module beside packages, that a name of `sim` or `real` is in."""
    return ".".join(name.split(".")[:2])


def arrows(paths: list[Path], root: Path = ROOT) -> dict[str, dict[str, str]]:
    """Returns, for each package, the packages that it imports, each with one import that does."""
    found: dict[str, dict[str, str]] = {}
    for path in paths:
        parts = path.relative_to(root).with_suffix("").parts
        mine = package_of(".".join(parts))
        for name in imports(path):
            other = package_of(name)
            if within(name, "sim", "real") and other not in (mine, "sim", "real"):
                found.setdefault(mine, {}).setdefault(other, f"{'/'.join(parts)}.py: {name}")
    return found


def circle(graph: dict[str, dict[str, str]]) -> list[str]:
    """Returns the imports of one circle of packages, or nothing."""
    done: set[str] = set()

    def follow(package: str, way: list[str]) -> list[str]:
        if package in way:
            steps = [*way[way.index(package) :], package]
            return [graph[a][b] for a, b in pairwise(steps)]
        if package not in done:
            for other in graph.get(package, {}):
                found = follow(other, [*way, package])
                if found:
                    return found
            done.add(package)
        return []

    return next((found for package in graph if (found := follow(package, []))), [])


def test_no_packages_import_each_other_in_a_circle() -> None:
    """Imports in functions count, and those for types: they say who has to know whom."""
    graph = arrows(sources("sim", "real"))
    assert {"sim.world", "sim.session", "sim.checks"} <= graph["sim.fuzz"].keys()
    assert circle(graph) == []


@pytest.mark.parametrize(
    ("files", "found"),
    [
        (
            {"sim/a.py": "import sim.b.c", "sim/b/c.py": "def f():\n    from sim.a import x"},
            ["sim/a.py: sim.b.c", "sim/b/c.py: sim.a.x"],
        ),
        (
            {
                "sim/a/x.py": "from sim.b import y",
                "sim/b/__init__.py": "from real.c import z",
                "real/c.py": "import sim.a.x",
            },
            ["sim/a/x.py: sim.b.y", "sim/b/__init__.py: real.c.z", "real/c.py: sim.a.x"],
        ),
        ({"sim/a/x.py": "import sim.a.y, sim.b", "sim/a/y.py": "import sim.a.x, torch"}, []),
        ({"sim/a.py": "import sim.b, sim.c", "sim/b.py": "import sim.c", "sim/c.py": ""}, []),
    ],
)
def test_the_search_for_circles_finds_them(
    tmp_path: Path, files: dict[str, str], found: list[str]
) -> None:
    """A search that finds nothing proves nothing."""
    for name, code in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(code)
    assert circle(arrows([tmp_path / name for name in files], tmp_path)) == found


def calls(path: Path, name: str) -> int:
    """Counts the calls of a name in a file, also where it is an attribute."""
    return sum(
        isinstance(node, ast.Call)
        and (
            (isinstance(node.func, ast.Name) and node.func.id == name)
            or (isinstance(node.func, ast.Attribute) and node.func.attr == name)
        )
        for node in ast.walk(ast.parse(path.read_text()))
    )


@pytest.mark.parametrize(
    ("name", "module"),
    [("World", "sim/session/world.py"), ("Trace", "real/trace/jsonl.py")],
)
def test_what_all_runs_share_is_made_in_one_place(name: str, module: str) -> None:
    """Whoever makes one by hand has to know again what belongs to it."""
    made = {relative(path): calls(path, name) for path in sources("sim", "real")}
    assert {path: count for path, count in made.items() if count} == {module: 1}


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("World(2)", 1),
        ("world.World(2).run(World(3))", 2),
        ("class World: ...\nWorld\nmake_world(2)\nx: World = MyWorld()", 0),
    ],
)
def test_the_search_for_calls_finds_them(tmp_path: Path, code: str, found: int) -> None:
    """A search that finds nothing proves nothing."""
    path = tmp_path / "code.py"
    path.write_text(code)
    assert calls(path, "World") == found
