"""The block of docs/kernels/tfla.md trains: it learns to recall, along the curve of the quadratic form in float32.

Every sequence draws its pairs of a key and a value anew and then asks for each key once, in another order: nothing but
what the block kept of the sequence tells the value.
"""

from __future__ import annotations

import importlib.util
import itertools
import math
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lrbench.tests import ROOT

PAGE = ROOT / "docs" / "kernels" / "tfla.md"
SEEDS = range(3)
STEPS, BATCH, VALUES = 200, 32, 16


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Steps this small are many times slower on threads that wait for each other while other tests run."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def block(tmp_path: Path) -> Iterator[Any]:
    """The page's block, from a module of its own: torch.compile imports the module of what it compiles."""
    (source,) = re.findall(r"^```python\n([^`]*class [^`]*)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    path = tmp_path / "mlstm_block.py"
    path.write_text(source, encoding="utf-8")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    sys.modules[path.stem] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module.MLSTMBlock
    del sys.modules[path.stem]


def recall_task(generator: torch.Generator, pairs: int) -> tuple[Tensor, Tensor]:
    """Return tokens [BATCH, 3 * pairs], pairs of a key and a value and then the keys again, and the values asked for.

    Keys are 0 to 2 * pairs - 1, each at most once a sequence; values are the tokens after those.
    """
    keys = torch.rand(BATCH, 2 * pairs, generator=generator).argsort(1)[:, :pairs]
    values = torch.randint(VALUES, (BATCH, pairs), generator=generator)
    order = torch.rand(BATCH, pairs, generator=generator).argsort(1)
    told = torch.stack((keys, 2 * pairs + values), dim=2).flatten(1)
    return torch.cat((told, keys.gather(1, order)), dim=1), values.gather(1, order)


def train(
    block: Any, seed: int, *, dim: int, pairs: int, device: str = "cpu", compiled: bool = False, **options: Any
) -> Tensor:
    """Return the log of the loss, a cross-entropy over the values asked for, at each of :data:`STEPS` steps.

    The seed draws the parameters and the data. What is compiled runs under autocast, as models of its kind do.
    """
    torch.manual_seed(seed)
    embedding, readout = nn.Embedding(2 * pairs + VALUES, dim), nn.Linear(dim, VALUES)
    model = nn.Sequential(embedding, block(dim, heads=2, **options), nn.RMSNorm(dim), readout).to(device)
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(seed)
    answer = torch.compile(model) if compiled else model
    losses = []
    for _ in range(STEPS):
        tokens, wanted = (each.to(device) for each in recall_task(generator, pairs))
        with torch.autocast(device, torch.bfloat16, enabled=compiled):
            logits = answer(tokens)[:, -pairs:]
        loss = F.cross_entropy(logits.flatten(0, 1).float(), wanted.flatten())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.detach())
    return torch.stack(losses).log().cpu()


def distance(a: Tensor, b: Tensor) -> float:
    """Return how far two curves lie apart: the root of the mean square over the steps."""
    return float((a - b).square().mean().sqrt())


def check_training(curves: list[Tensor], references: list[Tensor]) -> None:
    """Check curves of as many seeds: each falls below a tenth of its start, and follows the reference's of its seed.

    The noise is what the seed makes: a curve must be nearer to its reference than any two references are to each other.
    """
    for curve in curves:
        assert curve[-10:].max() < curve[0] + math.log(0.1)
    noise = min(distance(a, b) for a, b in itertools.combinations(references, 2))
    assert max(map(distance, curves, references)) < noise


def test_block_learns_to_recall_as_the_reference_does(block: Any) -> None:
    """In chunks of 16 steps, so that what is asked for last has passed through the state."""
    sizes = {"dim": 64, "pairs": 8}
    curves = [train(block, seed, **sizes, impl="torch", chunk_size=16) for seed in SEEDS]
    check_training(curves, [train(block, seed, **sizes, impl="parallel") for seed in SEEDS])


def test_compiled_block_is_the_eager_one(block: Any) -> None:
    """On the CPU, with gradients; the compiler leaves the portable form as it is and takes the rest of the block."""
    torch.manual_seed(0)
    eager = block(64, heads=2, impl="torch", chunk_size=16)
    x = torch.randn(2, 50, 64)
    results = []
    for run in (eager, torch.compile(eager, backend="aot_eager")):
        eager.zero_grad()
        out = run(x)
        out.square().sum().backward()
        results.append([out.detach(), *(parameter.grad.clone() for parameter in eager.parameters())])
    torch.testing.assert_close(*results)


@pytest.mark.gpu
def test_compiled_block_learns_to_recall_as_the_reference_does(block: Any) -> None:
    """The default kernels in bfloat16, in chunks of 64 steps."""
    sizes = {"dim": 256, "pairs": 32, "device": "cuda"}
    curves = [train(block, seed, **sizes, compiled=True, chunk_size=64) for seed in SEEDS]
    check_training(curves, [train(block, seed, **sizes, impl="parallel") for seed in SEEDS])
