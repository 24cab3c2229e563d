"""How it is measured. Standard output is for data: what a person is told goes to standard error."""

import sys


def note(*lines: str) -> None:
    """Print lines for people on standard error."""
    for line in lines:
        print(line, file=sys.stderr)
