"""The cases as a list for readers: docs/cases.md is what `python -m sim cases --list` prints."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from sim.cases.base import Case

_HEAD: Final = """\
# Public fault cases

Ways in which this integration has gone wrong in public. `python -m sim cases` runs each one twice:
with the fault, which has to be named by invariant, unit and rank (and by node and microbatch where
there are any), and as a twin without it, which has to be silent. This list is what
`python -m sim cases --list` prints; a test compares the two.

"""

_TAIL: Final = """
How a case is shown:

* scenario: Megatron's own model and schedule, with one defect in the hooks or beside them;
* kernel: a small body on fake ranks, real MFSDP units or torch modules under a faulty driver;
* trace: a short trace written by hand;
* source: the text of the code itself.

Most rules are the invariants of the hook contract. Others have names of their own: "overlap" for an
order of records under which two things can never overlap (the fake runtime has no clock), "import"
for an import that breaks the package, "coverage", "init" and "budget" for what a run has to cover,
start from and cost.
"""


def as_markdown(cases: Sequence[Case]) -> str:
    """Returns the list as a document."""
    lines = [
        "| case | what goes wrong | rule | named unit | shown by | twin |",
        "|---|---|---|---|---|---|",
    ]
    for case in cases:
        shown = case.not_on_cpu if case.shown is None else f"{case.shown}: {case.defect}"
        cells = (
            _source(case),
            case.title,
            " or ".join(case.rules),
            "" if case.unit is None else f"`{case.unit}`",
            f"not on a CPU: {shown}" if case.not_on_cpu else str(shown),
            case.twin,
        )
        lines.append(f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |")
    return _HEAD + "\n".join(lines) + "\n" + _TAIL


def _source(case: Case) -> str:
    is_address = case.source.startswith("https://")
    return f"[{case.id}]({case.source})" if is_address else f"{case.id} ({case.source})"


def as_list(cases: Sequence[Case]) -> list[dict[str, Any]]:
    """Returns the list as plain data."""
    return [
        {
            "id": case.id,
            "source": case.source,
            "title": case.title,
            "rules": list(case.rules),
            "unit": case.unit,
            "node": case.node,
            "microbatch": case.microbatch,
            "shown": None if case.shown is None else str(case.shown),
            "defect": case.defect,
            "twin": case.twin,
            "not_on_cpu": case.not_on_cpu,
        }
        for case in cases
    ]
