"""How it is measured. Standard output is for data: what a person is told goes to standard error.

| module | what it does |
|---|---|
| `request` | what is asked to be measured, and how: the options of the commands |
| `presets` | named sets of axes |
| `plan` | a request's axes -> cases |
| `environment` | device and versions; which rows this code's are |
| `worker` | what happens inside a worker process, which measures a case |
| `drive` | what the commands do around it: cases -> workers -> rows |
| `show` | what the commands print |

`drive` imports `worker`, `show` imports both, and all of them import the modules above.
"""

import sys


def note(*lines: str) -> None:
    """Print lines for people on standard error."""
    for line in lines:
        print(line, file=sys.stderr)
