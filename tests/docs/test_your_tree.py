"""Every command of docs/your-tree.md is run, and prints the lines that the page has under it."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "your-tree.md").read_text()
_TREE = re.compile(r"\$TREE_(\w+)")
_STATUS = re.compile(r"# exit status (\d)$")
_BLOCK = re.compile(r"^(#+) ([^\n]+)$|^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_NOT_RUN = "# not run by the tests: "


@dataclass
class Block:
    """A block of commands and the lines that the page says they print."""

    commands: str
    prints: list[str] = field(default_factory=list)

    @property
    def is_run(self) -> bool:
        return not self.commands.startswith(_NOT_RUN)

    def lines(self) -> list[str]:
        return self.commands.replace("\\\n", "").splitlines()


def _sections(page: str) -> Iterator[tuple[str, list[Block]]]:
    """Yields each heading that has commands, with its blocks."""
    heading, blocks = "", list[Block]()
    for match in _BLOCK.finditer(page):
        _, title, language, body = match.groups()
        if title is not None:
            if blocks:
                yield heading, blocks
            heading, blocks = title, []
        elif language == "sh":
            blocks.append(Block(body))
        elif language == "text":
            blocks[-1].prints += body.splitlines()
    if blocks:
        yield heading, blocks


SECTIONS = dict(_sections(PAGE))


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder in which the commands can run as they stand, without writing into this one."""
    for name in ("docs", "fixtures", "real", "sim"):
        (tmp_path / name).symlink_to(ROOT / name)
    return tmp_path


def _run(line: str, folder: Path) -> str:
    """Runs one command line, holds it to the status that it says, and returns what it prints."""
    command = line.replace(".venv/bin/python", shlex.quote(sys.executable))
    trees = {f"TREE_{n}": os.environ[f"MEGATRON_TREE_{n}"] for n in _TREE.findall(line)}
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=folder,
        env={**os.environ, **trees},
        capture_output=True,
        text=True,
        check=False,
    )
    status = _STATUS.search(line)
    output = done.stdout + done.stderr
    assert done.returncode == (int(status[1]) if status else 0), f"{line}\n{output}"
    return output


@pytest.mark.parametrize("heading", SECTIONS)
def test_the_commands_of_a_section_do_what_it_says(heading: str, checkout: Path) -> None:
    blocks = [block for block in SECTIONS[heading] if block.is_run]
    for name in sorted({n for block in blocks for n in _TREE.findall(block.commands)}):
        if f"MEGATRON_TREE_{name}" not in os.environ:
            pytest.skip(f"set MEGATRON_TREE_{name} to the folder of that Megatron tree")
    for block in blocks:
        printed = "\n".join(_run(line, checkout) for line in block.lines()).splitlines()
        for line in block.prints:
            assert line in printed, f"{line}\nnot in\n" + "\n".join(printed)


def test_the_page_shows_what_it_promises() -> None:
    run = [b.commands for blocks in SECTIONS.values() for b in blocks if b.is_run]
    shown = "".join(run)
    for words in ("--target mfsdp1 ", "--target native ", "sim check ", "--require ", "sim diff "):
        assert words in shown
    assert {heading[:2] for heading in SECTIONS if heading[1] == "."} == set(
        "A. B. C. D. E. F.".split()
    )


def test_the_documented_adapter_is_short() -> None:
    adapter = (ROOT / "docs" / "adapters" / "plain_mfsdp.py").read_text()
    assert len(adapter.splitlines()) < 200
