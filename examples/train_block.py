"""A small language model of mLSTM blocks, trained as the TFLA paper does: its figures 11 and 12 and table 3 in small.

    python examples/train_block.py                                                              # the figures, on a GPU
    python examples/train_block.py --input-gate-bias -10 --seq-len 512 --batch 16 --impl whole_state xl_chunk parallel
    python examples/train_block.py --dim 64 --heads 2 --layers 1 --batch 8 --steps 100 --seed 0           # on a CPU

The second is for the table. Each operation is trained from each bias of the input gate, with each implementation, from
each seed, which draws the weights and the text; a model of the first two has 52M parameters. `lrbench reproduce
tfla-fig11 tfla-fig12 tfla-table3` has the verdicts.

From the paper (section 5, appendix E.2): RMSNorm with an eps of 1e-6 before each layer and after the cell, SwiGLU, keys
half as wide as values, soft caps of 15 on the gates and of 30 on the logits, gates that start with weights of 0 and
biases of -10 (input) and 3 to 6 (forget); AdamW with betas of 0.9 and 0.95, a weight decay of 0.1 on linear layers,
gradients clipped to a norm of 0.5. Ours: 4 blocks of 1024, the text, a learning rate of 1e-3 that grows for a tenth of
the steps and then falls as a cosine. Texts are short, 64 tokens, since spikes come from where a memory is empty: in the
paper that is the start of every document.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import uuid
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lrbench.analysis.reproduce import training
from lrbench.bench.drive.run import file_name
from lrbench.bench.environment import current_environment
from lrbench.bench.worker.models import MLSTM, Block, Design, GatedMLP, linear, rms_norm, soft_cap
from lrbench.kernels.mlstm_exp import mlstm_exp
from lrbench.kernels.mlstm_sig import mlstm_sig
from lrbench.results import store
from lrbench.results.schema import CASE_COLUMNS, TrainingRow, case_id

OPERATIONS = {"mlstm_exp": mlstm_exp, "mlstm_sig": mlstm_sig}


def language_model(
    dim: int,
    heads: int,
    layers: int,
    vocabulary: int,
    *,
    op: Callable[..., Any] = mlstm_sig,
    input_gate_bias: float = -10.0,
    **options: Any,
) -> nn.Sequential:
    """Return a model from tokens [B, T] to logits [B, T, vocabulary]; ``options`` are the operation's."""
    sizes = {"num_heads": heads, "head_dim_qk": dim // heads // 2, "head_dim_v": dim // heads}
    layer = partial(MLSTM, partial(op, **options), sizes, input_gate_bias=input_gate_bias)
    design = Design(dim, rms_norm, layer, partial(GatedMLP, dim, 8 * dim / 3, nn.SiLU()))
    blocks = (Block(design) for _ in range(layers))
    return nn.Sequential(nn.Embedding(vocabulary, dim), *blocks, rms_norm(dim), linear(dim, vocabulary))


def write_text(generator: torch.Generator, batch: int, length: int, vocabulary: int) -> Tensor:
    """Return tokens [batch, length]: every text has words of its own, an eighth of the vocabulary, in random order.

    So a model without a memory has a loss of log(vocabulary) at least.
    """
    words = torch.rand(batch, vocabulary, generator=generator).topk(vocabulary // 8).indices
    return words.gather(1, torch.randint(vocabulary // 8, (batch, length), generator=generator))


def train(
    model: nn.Module, seed: int, *, vocabulary: int, steps: int, batch: int, seq_len: int, learning_rate: float
) -> tuple[Tensor, Tensor]:
    """Train a model on text that the seed draws, on a GPU under autocast to bfloat16.

    Returns:
        the loss and the gradient's norm before clipping at each step [steps].
    """
    device = next(model.parameters()).device
    kinds = {True: [], False: []}
    for module in model.modules():
        kinds[isinstance(module, nn.Linear)] += module.parameters(recurse=False)
    decayed = [each for each in kinds[True] if each.ndim == 2]
    others = [*kinds[False], *(each for each in kinds[True] if each.ndim == 1)]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=learning_rate, betas=(0.9, 0.95), fused=device.type == "cuda")
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, learning_rate, total_steps=steps, pct_start=0.1, cycle_momentum=False
    )
    generator, losses, norms = torch.Generator().manual_seed(seed), [], []
    for _ in range(steps):
        tokens = write_text(generator, batch, seq_len + 1, vocabulary).to(device)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            logits = soft_cap(model(tokens[:, :-1]).float(), 30.0)
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5).detach())
        optimizer.step()
        schedule.step()
        losses.append(loss.detach())
    return torch.stack(losses).cpu(), torch.stack(norms).cpu()


def main(arguments: Sequence[str] | None = None) -> None:
    """Train every model that is asked for, print a line for each, and write a row for each."""
    device, dtype = ("cuda", "bf16") if torch.cuda.is_available() else ("cpu", "fp32")
    impl = "whole_state" if device == "cuda" else "torch"
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--op", nargs="+", choices=OPERATIONS, default=[*OPERATIONS])
    parser.add_argument("--impl", nargs="+", default=[impl, training.REFERENCE])
    parser.add_argument("--input-gate-bias", nargs="+", type=float, default=[0.0, -10.0])
    parser.add_argument("--seed", nargs="+", type=int, default=[0, 1, 2])
    sizes = {"dim": 1024, "heads": 8, "layers": 4, "vocabulary": 64, "batch": 128, "seq_len": 64, "steps": 400}
    for name, size in sizes.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=size)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--output", type=Path, default=Path("results", "local"), help="folder for the rows")
    args = parser.parse_args(arguments)

    run_id, rows = uuid.uuid4().hex, []
    path = args.output / store.OTHER / f"{file_name('training', run_id)}.training.parquet"
    shared = {**dict.fromkeys(CASE_COLUMNS), **current_environment().columns(), "run_id": run_id, "kernel": "tfla"}
    shared |= {"provider": "lrbench", "mode": "train", "dtype": dtype}
    shared |= {"batch": args.batch, "seq_len": args.seq_len, "num_heads": args.heads, "layers": args.layers}
    shared |= {"head_dim_qk": args.dim // args.heads // 2, "head_dim_v": args.dim // args.heads}
    for op, bias, impl, seed in itertools.product(args.op, args.input_gate_bias, args.impl, args.seed):
        torch.manual_seed(seed)
        options = {"op": OPERATIONS[op], "input_gate_bias": bias, "impl": impl}
        model = language_model(args.dim, args.heads, args.layers, args.vocabulary, **options).to(device)
        common = {name: getattr(args, name) for name in ("vocabulary", "steps", "batch", "seq_len", "learning_rate")}
        losses, norms = (each.tolist() for each in train(model, seed, **common))
        row = {**shared, "op": op, "impl": impl, "input_gate_bias": bias, "seed": seed}
        row |= {"losses": losses, "gradient_norms": norms, "measured_at": f"{datetime.now(timezone.utc):%FT%T+00:00}"}
        rows.append(dataclasses.asdict(TrainingRow(**row, case_id=case_id(row))))
        # After each: what was trained survives a kill.
        store.write_parquet(rows, path, TrainingRow)
        said = f"loss {losses[0]:.3f} to {losses[-1]:.3f}, {training.spikes(norms)} spikes"
        print(
            f"{op} {impl}, bias {bias:g}, seed {seed}: {said}, spread {training.gradient_spread(norms):.3f}", flush=True
        )
    print(f"rows: {path}")


if __name__ == "__main__":
    main()
