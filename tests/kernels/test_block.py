"""The model of examples/train_block.py trains, along the curve of the quadratic form, and its gates are the paper's."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lrbench.analysis.reproduce.training import curve_distance
from lrbench.bench.worker.models import MLSTM
from lrbench.examples.train_block import OPERATIONS, language_model, main, train
from lrbench.kernels.mlstm_sig import mlstm_sig
from lrbench.results.schema import TrainingRow
from lrbench.results.store import read_file

SEEDS = range(3)
VOCABULARY = 32
SIZES = {"num_heads": 2, "head_dim_qk": 16, "head_dim_v": 32}


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Steps this small are many times slower on threads that wait for each other while other tests run."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def trained(
    seed: int,
    *,
    dim: int = 32,
    seq_len: int = 32,
    steps: int = 100,
    device: str = "cpu",
    compiled: bool = False,
    **options: Any,
) -> list[list[float]]:
    """Return losses and gradient norms of a model of one block; the seed draws its weights and the text."""
    torch.manual_seed(seed)
    model = language_model(dim, 2, 1, VOCABULARY, **options).to(device)
    sizes = {"vocabulary": VOCABULARY, "steps": steps, "batch": 16, "seq_len": seq_len, "learning_rate": 3e-3}
    return [each.tolist() for each in train(torch.compile(model) if compiled else model, seed, **sizes)]


def check_training(curves: list[list[float]], references: list[list[float]]) -> None:
    """Check losses of as many seeds: they show a memory, and follow the reference's of their seed."""
    for seed, curve in enumerate(curves):
        assert max(curve[-10:]) < math.log(VOCABULARY) - 0.2
        assert curve_distance(curve, dict(enumerate(references)), seed) < 1


def test_model_trains_as_the_reference_does() -> None:
    """In chunks of 16 steps, so that much of a text has passed through the state."""
    curves = [trained(seed, impl="torch", chunk_size=16)[0] for seed in SEEDS]
    check_training(curves, [trained(seed, impl="parallel")[0] for seed in SEEDS])


@pytest.mark.gpu
def test_compiled_model_trains_as_the_reference_does() -> None:
    """The default kernels in bfloat16, in chunks of 64 steps."""
    sizes = {"dim": 256, "seq_len": 256, "device": "cuda"}
    curves = [trained(seed, **sizes, compiled=True, chunk_size=64)[0] for seed in SEEDS]
    check_training(curves, [trained(seed, **sizes, impl="parallel")[0] for seed in SEEDS])


@pytest.mark.parametrize("op", OPERATIONS.values(), ids=OPERATIONS)
def test_gradients_vary_less_from_the_bias_of_the_paper(op: Any) -> None:
    """Where the spikes of figures 11 and 12 are from: the norm makes s v, the first output, +-v unless s is near 0."""
    torch.manual_seed(0)
    texts, ratios = torch.randn(50, 1, 1, 64), []
    for bias in (0.0, -10.0):
        layer = MLSTM(partial(op, impl="parallel"), SIZES, input_gate_bias=bias)
        norms = [torch.autograd.grad((layer(x) * x).sum(), layer.qkv[0].weight)[0].norm() for x in texts]
        ratios.append(max(norms) / torch.stack(norms).median())
    assert ratios[0] > 100 and ratios[1] < 10


def test_gates_and_norm_are_those_of_the_paper() -> None:
    """Soft caps of 15 on the pre-activations, biases of -10 and 3 to 6; an eps of 1e-6 in the norm."""
    seen: list[Tensor] = []
    for gates in (("i", "f"), ("g",)):
        layer = MLSTM(lambda q, k, v, *given: seen.extend(given) or v, SIZES, gates)
        layer(torch.randn(1, 5, 64))
    capped = 15 * torch.tanh(torch.tensor([-10.0, -10.0, 3.0, 6.0]) / 15)
    expected = torch.cat((capped, torch.sigmoid(capped[2:]).log()))
    torch.testing.assert_close(torch.cat(seen, dim=-1), expected.expand(1, 5, 6))
    torch.testing.assert_close(layer.norm(torch.full((32,), 1e-3)), torch.full((32,), 0.5**0.5))


def test_compiled_layer_is_the_eager_one() -> None:
    """On the CPU, with gradients; the compiler leaves the portable form as it is and takes the rest of the layer."""
    torch.manual_seed(0)
    eager = MLSTM(partial(mlstm_sig, impl="torch", chunk_size=16), SIZES)
    x = torch.randn(2, 50, 64)
    results = []
    for run in (eager, torch.compile(eager, backend="aot_eager")):
        eager.zero_grad()
        out = run(x)
        out.square().sum().backward()
        results.append([out.detach(), *(parameter.grad.clone() for parameter in eager.parameters())])
    torch.testing.assert_close(*results)


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A row for each operation, bias, implementation and seed, of what was trained."""
    sizes = "--dim 32 --heads 2 --layers 1 --vocabulary 32 --batch 2 --seq-len 8 --steps 3 --seed 0"
    main([*sizes.split(), "--impl", "torch", "parallel", "--output", str(tmp_path)])
    (path,) = tmp_path.glob("_other/training-*.training.parquet")
    rows = read_file(path, TrainingRow).to_pylist()
    assert [(row["op"], row["input_gate_bias"], row["impl"]) for row in rows] == [
        (op, bias, impl) for op in OPERATIONS for bias in (0.0, -10.0) for impl in ("torch", "parallel")
    ]
    assert {(row["mode"], row["dtype"], row["head_dim_qk"], row["head_dim_v"]) for row in rows} == {
        ("train", "bf16" if torch.cuda.is_available() else "fp32", 8, 16)
    }
    assert all(len(row[name]) == 3 for row in rows for name in ("losses", "gradient_norms"))
    assert capsys.readouterr().out.count("spread") == len(rows)
