"""The command line of a benchmark, by itself (`python -m benchmarks.bench_OP`) or as `manus-fast bench OP`."""

from __future__ import annotations

import argparse
import sys
from typing import NoReturn

from manus_fast.errors import UserError
from manus_fast.paths import check_output_file


class Parser(argparse.ArgumentParser):
    """argparse's parser, whose refusals are one sentence under `manus-fast`, as those of its other commands are.

    Args:
        op: the module's name without `bench_`.
        text: the module's docstring, whose first line says what is measured.
    """

    def __init__(self, op: str, text: str | None):
        prog = f"python -m benchmarks.bench_{op}" if _by_itself() else f"manus-fast bench {op}"
        super().__init__(prog=prog, description=(text or "").partition("\n")[0])

    def error(self, message: str) -> NoReturn:
        if _by_itself():
            super().error(message)
        raise UserError(f"{message.removeprefix('argument ')} (see {self.prog} --help)")


def output_file(text: str) -> str:
    """The type of an argument that names a file to write: refused before anything is measured, not after it."""
    try:
        check_output_file("", text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error).removeprefix(": ")) from error
    return text


def _by_itself() -> bool:
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return spec is not None and spec.name.startswith("benchmarks.")
