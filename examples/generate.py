"""Text from a model of mLSTM blocks, token by token, as a user sees it: eager and under a CUDA graph.

    python examples/generate.py                                             # xLSTM's sizes of 160M parameters, on a GPU
    python examples/generate.py --dim 64 --heads 2 --layers 1 --vocabulary 64 --tokens 16                     # on a CPU

The prompt is read in one pass, which leaves the state of every layer; a token then costs the same however many came
before it. Prints the time of the prompt and the tokens a second after it. The weights are random, so the text is too.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lrbench.bench.worker.models import MLSTM
from lrbench.examples.train_block import OPERATIONS, language_model


class Continued:
    """An operation that goes on from the state in which its last call left it, in the same memory."""

    def __init__(self, op: Callable[..., Any]) -> None:
        self.op, self.state = op, None

    def __call__(self, q: Tensor, *others: Tensor) -> Tensor:
        decoding = "step" if self.state is not None and q.shape[1] == 1 else None
        impl = decoding if q.is_cuda else "torch"
        h, last = self.op(q, *others, impl=impl, initial_state=self.state, return_last_state=True)
        if self.state is None:
            self.state = last
        else:
            for kept, new in zip(tree_leaves(self.state), tree_leaves(last), strict=True):
                kept.copy_(new)
        return h


class Generator:
    """Generates the likeliest tokens after a prompt.

    Args:
        model: tokens [B, T] to logits [B, T, vocabulary], of :func:`.train_block.language_model`.
        op: the operation of its layers.
        prompt: tokens [B, T]; :attr:`token` [B, 1] is then the first after it.
    """

    @torch.no_grad()
    def __init__(self, model: nn.Module, op: Callable[..., Any], prompt: Tensor) -> None:
        self.model, self.layers = model, [each for each in model.modules() if isinstance(each, MLSTM)]
        for layer in self.layers:
            layer.mix = Continued(op)
        self.token = model(prompt)[:, -1:].argmax(-1)

    @torch.no_grad()
    def step(self) -> None:
        """Put the next token in the place of the last one."""
        self.token.copy_(self.model(self.token).argmax(-1))

    def captured(self) -> Callable[[], None]:
        """Return the step as a CUDA graph; token and states stay as they are."""
        changed = [self.token, *tree_leaves([layer.mix.state for layer in self.layers])]
        before = [each.clone() for each in changed]
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                self.step()
        torch.cuda.current_stream().wait_stream(side)
        with torch.cuda.graph(graph := torch.cuda.CUDAGraph()):
            self.step()
        for each, value in zip(changed, before, strict=True):
            each.copy_(value)
        return graph.replay

    def tokens(self, number: int, step: Callable[[], None] | None = None) -> Tensor:
        """Return the token [B, 1] and those that follow, ``number`` in all, by ``step``, None: eager."""
        found = [self.token.clone()]
        for _ in range(number - 1):
            (step or self.step)()
            found.append(self.token.clone())
        return torch.cat(found, dim=1)


def timed(function: Callable[[], Any], device: str) -> tuple[Any, float]:
    """Return what a function returns, and the seconds until the device has computed it."""
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    result = function()
    if device == "cuda":
        torch.cuda.synchronize()
    return result, time.perf_counter() - start


def main(arguments: Sequence[str] | None = None) -> None:
    """Print what the prompt takes, and the tokens a second after it."""
    device, dtype = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--op", choices=OPERATIONS, default="mlstm_sig")
    sizes = {"dim": 768, "heads": 6, "layers": 12, "vocabulary": 50304, "batch": 1, "prompt": 512, "tokens": 256}
    for name, size in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=size)
    args = parser.parse_args(arguments)
    torch.manual_seed(0)
    model = language_model(args.dim, args.heads, args.layers, args.vocabulary).to(device, dtype)
    prompt = torch.randint(args.vocabulary, (args.batch, args.prompt), device=device)
    for how in ("eager", "CUDA graph") if device == "cuda" else ("eager",):
        # Kernels are compiled in the first round.
        for _ in range(2):
            generator, read_s = timed(lambda: Generator(model, OPERATIONS[args.op], prompt), device)
            step = None if how == "eager" else generator.captured()
            _, wrote_s = timed(lambda generator=generator, step=step: generator.tokens(args.tokens, step), device)
        speed = args.batch * (args.tokens - 1) / wrote_s
        print(f"{args.op}, batch {args.batch}, {how}: prompt {1e3 * read_s:.2f} ms, {speed:.0f} tokens/s")


if __name__ == "__main__":
    main()
