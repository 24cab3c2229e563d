"""lrbench roofline --of: a user's function, what is counted of it, and what is said where it cannot be."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch

from lrbench.bench.drive.own_function import OwnFunction, load, observe
from lrbench.tests import ROOT
from lrbench.tests.command_line import Lrbench, Run, refused

MINE = """
import torch

a, b, out = torch.ones(64, 32), torch.ones(32, 16), torch.ones(64, 16)
w = torch.ones(16, 32, requires_grad=True)

def product():
    return (a @ b).relu().half() @ torch.ones(16, 8).half()  # what is made within is neither read nor written

def in_place():
    torch.mm(a, b, out=out)
    out.add_(1)

def part():
    return a[:1].expand(64, 32).clone()

def linear():
    w.grad = None
    torch.nn.functional.linear(a, w).sum().backward()

graphs = []

def backend(module, inputs):
    return lambda *args: graphs.append(module) or module(*args)

compiled = torch.compile(lambda: a @ b, backend=backend, fullgraph=True)

def sums(x, y=None):
    return x.sum()

def raises():
    return a @ a

def nothing():
    return 3

def empty():
    return torch.ones(0, 4) + 1

def exits():
    raise SystemExit(3)

rows, table, sparse = torch.arange(10), torch.ones(1000, 64), a.to_sparse()

def lookup():
    return torch.nn.functional.embedding(rows, table)

def overwrites():
    out.copy_(a[:, :16])

def multiplies_sparse():
    return sparse @ b
"""


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    example = re.search(r"^```python\n(import torch.*?)^```", (ROOT / "docs/figures.md").read_text(), re.M | re.S)
    assert example is not None
    (tmp_path / "mine_to_count.py").write_text(MINE)
    (tmp_path / "my_module.py").write_text(example[1])
    layer = "import torch\nlayer = torch.nn.Linear(32, 16, bias=False)\ndef get_inputs():\n    return "
    (tmp_path / "layer_with_inputs.py").write_text(f"{layer}[torch.ones(64, 32)]")
    (tmp_path / "layer_with_tensor.py").write_text(f"{layer}torch.ones(64, 32)")
    (tmp_path / "broken_module.py").write_text("import nowhere_to_be_found")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.parametrize(
    ("target", "flops", "floats"),
    [
        ("mine_to_count:product", 2 * 64 * 16 * (32 + 8), 64 * 32 + 32 * 16 + 64 * 8 / 2),
        ("mine_to_count:in_place", 2 * 64 * 16 * 32, 64 * 32 + 32 * 16 + 2 * 64 * 16),
        ("mine_to_count:part", 0, 32 + 64 * 32),
        ("mine_to_count:lookup", 0, 2 * 10 + 2 * 10 * 64),
        ("mine_to_count:overwrites", 0, 2 * 64 * 16),
        ("mine_to_count:linear", 2 * 2 * 64 * 32 * 16, 64 * 32 + 2 * 32 * 16),
        ("layer_with_inputs:layer", 2 * 64 * 32 * 16, 64 * 32 + 32 * 16 + 64 * 16),
        ("my_module:project", 4 * 128 * 256 * 256, 128 * 256 + 2 * 256 * 256),
    ],
)
def test_flops_and_bytes(target: str, flops: int, floats: float) -> None:
    seen = observe(load(target))
    assert (seen.flops, seen.bytes, seen.dtype, seen.device) == (flops, 4 * floats, "fp32", "cpu")


def test_a_compiled_function_is_timed_compiled() -> None:
    function = load("mine_to_count:compiled")
    assert observe(function).flops == 2 * 64 * 16 * 32
    function()
    assert len(sys.modules["mine_to_count"].graphs) == 1


def test_the_example_is_drawn(run: Run, tmp_path: Path) -> None:
    line, figure = run("roofline", "--of", "my_module:project", "-o", tmp_path / "a.svg").splitlines()
    pattern = r"my_module:project: 0\.03355 GFLOP, 0\.0006554 GB, 51\.2 FLOP/B, \S+ ms, \S+% of the bound \(compute, "
    assert re.match(pattern, line)
    assert "my_module:project" in Path(figure).read_text()
    assert "no FLOPs are counted" in run("roofline", "--of", "mine_to_count:part", "-o", tmp_path / "b.svg")
    assert not (tmp_path / "b.svg").exists()


def test_arguments_are_counted_as_far_as_they_are_read() -> None:
    """A table as far as rows are taken, a target not at all; sparse and nested ones are refused by name."""
    table, x = torch.ones(100, 4), torch.ones(4, 4)
    for function, arguments, moved in (
        (lambda table, rows: table[rows], (table, torch.arange(3)), 3 * 8 + 2 * 3 * 16),
        (lambda table, rows: table[rows] + table.sum(), (table, torch.arange(3)), 3 * 8 + 1600 + 3 * 16),
        (lambda x, out: torch.mm(x, x, out=out), (x, x.clone()), 2 * 64),
        (lambda out: out.zero_(), (x.clone(),), 64),
    ):
        assert observe(OwnFunction(target="f", function=function, arguments=arguments)).bytes == moved
    for refused_one, kind in ((x.to_sparse(), "sparse_coo"), (torch.nested.nested_tensor([x]), "nested")):
        with pytest.raises(ValueError, match=f"argument 2 of f must be dense, got a {kind} tensor"):
            OwnFunction(target="f", function=torch.mm, arguments=(x, refused_one))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("", "needs result files or folders, or --of"),
        ("--of mine_to_count", "must be named my_module:function, got 'mine_to_count'"),
        ("--of nowhere_to_be_found:f", "nowhere_to_be_found cannot be imported: ModuleNotFoundError"),
        ("--of broken_module:f", "broken_module cannot be imported: ModuleNotFoundError"),
        ("--of mine/to_count.py:f", "got 'mine/to_count.py:f'; type mine.to_count:f"),
        ("--of mine_to_count:summs", "module mine_to_count has no function summs; type mine_to_count:sums"),
        ("--of mine_to_count:other", "module mine_to_count has no function other; type mine_to_count:"),
        ("--of mine_to_count:sums", "`lrbench time` also takes them as --arg"),
        ("--of layer_with_tensor:layer", "must have get_inputs(), which returns a list of them"),
        ("--of mine_to_count:exits", "raised in mine_to_count.py, line 41: SystemExit: 3"),
        ("--of mine_to_count:empty", "must read or return tensors, got none"),
        ("--of mine_to_count:raises", "raised in mine_to_count.py, line 32: RuntimeError: mat1 and mat2 shapes"),
        ("--of mine_to_count:nothing", "must read or return tensors, got none"),
        ("--of mine_to_count:multiplies_sparse", "must be dense to be counted, got a sparse_coo one"),
        ("--of mine_to_count:sleeps --width 0", "width must be from 2.5 to 50 inches, got 0"),
        ("--of mine_to_count:sleeps --dpi 0", "dpi must be from 1 to 1200, got 0"),
        ("--of mine_to_count:part --gpu h100", "--gpu cannot be given with --of"),
        ("--of mine_to_count:part --counters", "--counters needs a GPU"),
    ],
)
def test_errors(arguments: str, message: str, lrbench: Lrbench) -> None:
    assert message in refused(lrbench, f"roofline {arguments}")
