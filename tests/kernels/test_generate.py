"""examples/generate.py: token by token a model says what it says of the whole text, also replayed from a CUDA graph."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lrbench.examples.generate import Generator, main
from lrbench.examples.train_block import OPERATIONS, language_model


def model_of(op: str, dim: int) -> nn.Module:
    """Return a model whose layers hold on to what they have read: its input gates are half open."""
    torch.manual_seed(0)
    return language_model(dim, 2, 2, 64, op=OPERATIONS[op], input_gate_bias=0.0, impl="torch")


@torch.no_grad()
@pytest.mark.parametrize("op", OPERATIONS)
def test_tokens_are_the_likeliest_of_the_whole_text(op: str) -> None:
    model, prompt = model_of(op, 32).double(), torch.randint(64, (4, 9))
    text = prompt
    for _ in range(8):
        text = torch.cat((text, model(text)[:, -1:].argmax(-1)), dim=1)
    assert torch.equal(Generator(model, OPERATIONS[op], prompt).tokens(8), text[:, 9:])
    assert not torch.equal(Generator(model, OPERATIONS[op], prompt[:, -1:]).tokens(8), text[:, 9:])


@pytest.mark.gpu
@pytest.mark.parametrize("op", OPERATIONS)
def test_a_graph_generates_the_same(op: str) -> None:
    model, prompt = model_of(op, 128).to("cuda", torch.bfloat16), torch.randint(64, (2, 100), device="cuda")
    eager, replayed = (Generator(model, OPERATIONS[op], prompt) for _ in range(2))
    assert torch.equal(replayed.tokens(20, replayed.captured()), eager.tokens(20))


def test_command(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = "--dim 32 --heads 2 --layers 1 --vocabulary 32 --prompt 8 --tokens 4 --batch 2"
    main([*sizes.split(), "--op", "mlstm_exp"])
    assert "mlstm_exp, batch 2, " in capsys.readouterr().out
