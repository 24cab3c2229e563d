"""How it is measured. Standard output is for data: what a person is told goes to standard error."""

import sys


def note(message: str) -> None:
    """Print a line for people on standard error."""
    print(message, file=sys.stderr)
