"""Keeps start-up messages of torch and Megatron off the screen: they say what a bench knows."""

from __future__ import annotations

import logging
import warnings

_TALKATIVE = ("megatron", "torch.utils.cpp_extension", "torch.distributed")


def quiet() -> None:
    """Silences import-time warnings of the frameworks; errors still show."""
    for name in _TALKATIVE:
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
