"""Print the tables, or renew them in a file that has their marks: ``python -m tests.peers [README.md]``."""

import sys
from pathlib import Path

from tests.peers import table

if __name__ == "__main__":
    for path in map(Path, sys.argv[1:]):
        path.write_text(table.renewed(path.read_text()))
    if not sys.argv[1:]:
        print(table.markdown())
