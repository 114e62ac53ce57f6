"""One rank of test_ranks_runs.py: `python runs_worker.py FILE` gives each command line of FILE (JSON) to the CLI."""

import json
import sys
from pathlib import Path

from manus_fast.cli import main

if __name__ == "__main__":
    for words in json.loads(Path(sys.argv[1]).read_text()):
        code = main(words)
        if code != 0:
            sys.exit(code)
