"""The error that says which rule of the hook contract is broken, and for which unit."""

from __future__ import annotations


class ContractError(RuntimeError):
    """The caller or the model broke the hook contract (docs/contract.md).

    Args:
        message: One sentence: what was expected and what was got.
        rule: The invariant, "I1" to "I21".
        unit: Name of the FSDP unit; the root's is the empty string. None when it is no single one.
    """

    def __init__(self, message: str, *, rule: str, unit: str | None) -> None:
        super().__init__(message)
        self.rule = rule
        self.unit = unit
