"""Where a worker process begins: it ties its life to its parent's, then imports torch, which takes seconds.

Requests come over a socket that only parent and worker hold, so that nothing a package prints can break the protocol;
under a profiler requests and replies are lines of two files.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import inspect
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any


def main(arguments: Sequence[str]) -> None:
    """Serve ("socket", its descriptor, the parent's process id), or ("files", the requests' and the replies' paths)."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    how, source, other = arguments
    if how == "socket":
        _die_with(int(other))
    from . import correctness, memory
    from .protocol import STACK_FILE, STACK_SIGNAL
    from .worker import serve

    for mode in (correctness.PoisonEmpty, memory.StorageTracker):
        mode.__torch_dispatch__ = _without_compiler(mode.__torch_dispatch__)  # type: ignore[method-assign]
    if how == "socket":
        # On STACK_SIGNAL the stack is written there, so that the parent can say where a case hung.
        stack = open(STACK_FILE, "w")  # noqa: SIM115, open for as long as the process runs
        faulthandler.register(STACK_SIGNAL, file=stack, all_threads=False)
        os.set_inheritable(int(source), False)
        connection = Connection(int(source))
        serve(_received(connection), lambda reply: connection.send_bytes(json.dumps(reply).encode()))
        # The parent waits, and Python's own end takes torch down for a quarter second.
        sys.stdout.flush()
        os._exit(0)
    with open(source, encoding="utf-8") as lines, open(other, "w", encoding="utf-8") as replies:
        serve(map(json.loads, lines), lambda reply: print(json.dumps(reply), file=replies, flush=True))


def _die_with(parent: int) -> None:
    """Ask Linux to kill this process when the parent dies, so that a hung case does not outlive a killed sweep."""
    pr_set_pdeathsig = 1
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _without_compiler(kept: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that torch keeps from torch.compile, which does not import that: it takes as long as torch."""
    return lambda *given: (kept if "torch._dynamo" in sys.modules else inspect.unwrap(kept))(*given)


def _received(connection: Connection) -> Iterator[dict[str, Any]]:
    """Yield requests until the parent closes the connection."""
    with contextlib.suppress(EOFError, OSError):
        while True:
            yield json.loads(connection.recv_bytes())


if __name__ == "__main__":
    main(sys.argv[1:])
