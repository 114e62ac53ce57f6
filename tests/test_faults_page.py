"""docs/faults.md keeps its word: every test that it names is there, and every row names one."""

import re
from pathlib import Path

TESTS = Path(__file__).resolve().parent
TEXT = (TESTS.parent / "docs" / "faults.md").read_text()


def test_every_row_names_tests_that_exist():
    heads = ("|---", "| fault", "| reported")
    rows = [line for line in TEXT.splitlines() if line.startswith("|") and not line.startswith(heads)]
    assert len(rows) > 40
    for row in rows:
        named = re.findall(r"`(test_\w+\.py)::(test_\w+)`", row)
        assert named, row
        for file, name in named:
            assert f"def {name}(" in (TESTS / file).read_text(), (file, name)
