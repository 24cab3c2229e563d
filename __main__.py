"""The command line as `python -m lrbench`."""

# mypy meets this file as the program's main module, outside of the package.
from .cli import main  # type: ignore[import-not-found]

if __name__ == "__main__":
    main()
