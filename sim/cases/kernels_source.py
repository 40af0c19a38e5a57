"""Cases in the text of the code: what a module imports while the package is being imported."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from sim.checks import Violation

IMPORT_CYCLE: Final = "import"
"""The rule of module-level imports: no invariant of the contract is about them."""

_BANNED: Final = "megatron.core.transformer.multi_token_prediction"
_SCHEDULER: Final = "megatron.core.models.common.model_chunk_schedule_plan"
_OURS: Final = ("real.mcore.schedule", "real.mcore.consumers", "real.mcore.internals.nodes")


def imports_as_released() -> list[Violation]:
    """Checks the released schedule plan and our adapter."""
    return [
        violation
        for name in (_SCHEDULER, *_OURS)
        for violation in check_imports(name, _source_of(name))
    ]


def import_at_module_level() -> list[Violation]:
    """Checks the released schedule plan with the import at its top."""
    line = f"from {_BANNED} import MultiTokenPredictionLayer\n"
    return check_imports(_SCHEDULER, line + _source_of(_SCHEDULER))


def check_imports(name: str, source: str) -> list[Violation]:
    """Finds imports of the prediction layer that run while `name` is imported.

    The package imports the schedule while it initializes, and the prediction layer imports the
    package: such an import breaks `import megatron.core` for everyone.
    """
    return [
        Violation(
            rule=IMPORT_CYCLE,
            rank=0,
            message=f"{name} imports {imported} at module level, in line {line}.",
        )
        for imported, line in _module_level_imports(ast.parse(source))
        if imported == _BANNED or imported.startswith(f"{_BANNED}.")
    ]


def _module_level_imports(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Yields imports outside of functions, and outside of blocks for type checkers."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield node.module, node.lineno
            yield from ((f"{node.module}.{alias.name}", node.lineno) for alias in node.names)
        else:
            yield from _module_level_imports(node)


def _source_of(name: str) -> str:
    spec = importlib.util.find_spec(name)
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).read_text(encoding="utf-8")
