"""What a user asks to be measured, and how. A field's text is what `--help` says of its option."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple, get_type_hints

from ..results.arguments import parse_names, parse_size, parse_sizes

Names = tuple[str, ...] | None
Lengths = tuple[int, ...] | None

LOCAL = Path("results/local")


class Option(NamedTuple):
    """What the command line says of a dataclass's field, ``x: Annotated[int, Option("Help.", parse_size)]``.

    Attributes:
        parse: turns the text and the option's name, for error messages, into the value; without it the text is the
            value.
        flag: the option's name, by default made from the field's, without _s for seconds; ``also`` are further ones.
        panel: the group of options in the help.
        least: of a number.
        says_default: whether the help says the default.
    """

    help: str
    parse: Callable[[Any, str], Any] | None = None
    flag: str | None = None
    also: tuple[str, ...] = ()
    panel: str | None = None
    least: float | None = None
    says_default: bool = True


axis = functools.partial(Option, panel="Axes (comma-separated lists; the preset's where left out)")
GPU = Option("Accelerator; see `lrbench gpus` [the GPU that is here, else h100].")
FOLDER, TIMEOUT = Option("Folder of the parquet file."), Option("Seconds until a case is ended.", least=0.001)


@dataclass(frozen=True, slots=True, kw_only=True)
class Axes:
    """What is measured by sweep, profile and compare --live; None leaves an axis to the preset."""

    ops: Annotated[Names, axis("Operations.", parse_names, "--op")] = None
    seq_lens: Annotated[Lengths, axis("Sequence lengths: 1k,8k (1k = 1024).", parse_sizes, "--seq-len")] = None
    head_dims: Annotated[Lengths, axis("Value head dims.", parse_sizes, "--head-dim")] = None
    head_dims_qk: Annotated[
        Lengths,
        axis("Query-key head dims [half the value's for mLSTM, equal elsewhere].", parse_sizes, "--head-dim-qk"),
    ] = None
    chunk_sizes: Annotated[Lengths, axis("Chunk lengths.", parse_sizes, "--chunk-size")] = None
    num_heads: Annotated[int | None, axis("Heads [embedding dim / head dim].", least=1)] = None
    num_heads_qk: Annotated[int | None, axis("Heads of queries and keys [as many].", None, "--qk-heads", least=1)] = (
        None
    )
    channels: Annotated[Lengths, axis("Channels, of operations without heads.", parse_sizes, "--channels")] = None
    d_models: Annotated[Lengths, axis("Model dims of an MLP.", parse_sizes, "--d-model")] = None
    d_ffs: Annotated[
        Lengths, axis("Hidden dims of an MLP [as the preset, else 3.5 d_model].", parse_sizes, "--d-ff")
    ] = None
    tokens: Annotated[int | None, axis("Batch times sequence length, held constant.", parse_size, "--tokens")] = None
    batches: Annotated[Lengths, axis("Batches, in place of --tokens: 1,16.", parse_sizes, "--batch")] = None
    contexts: Annotated[
        Lengths, axis("Tokens in attention's key-value cache, of mode step: 1k,128k.", parse_sizes, "--context")
    ] = None
    layers: Annotated[int | None, axis("Layers of a model, of mode train [by its width].", least=1)] = None
    documents: Annotated[
        Names,
        axis(
            "Packed documents, in a batch of 1 of --seq-len or --tokens positions: 64, of lengths drawn uniformly from "
            "0.1 to 1.9 times their mean; 64x1024 or 300+700, of these; or a file with a length a line.",
            parse_names,
        ),
    ] = None
    modes: Annotated[Names, axis("fw, fwbw, bw, step, train.", parse_names, "--mode")] = None
    dtypes: Annotated[Names, axis("bf16, fp16, fp32, fp64.", parse_names, "--dtype")] = None
    state_dtypes: Annotated[
        Names, axis("Dtypes of the states between chunks: fp32, bf16.", parse_names, "--state-dtype")
    ] = None


FLAGS = {
    name: hint.__metadata__[0].flag or f"--{name.replace('_', '-')}"
    for name, hint in get_type_hints(Axes, include_extras=True).items()
}
"""Field of :class:`Axes` -> its option."""

COLUMNS = {name: flag[2:].replace("-", "_") for name, flag in FLAGS.items()} | {
    "head_dims": "head_dim_v", "num_heads_qk": "num_heads_qk",
}  # fmt: skip
"""Field of :class:`Axes` -> the column of a case that it has values of; tokens are none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request(Axes):
    """Axes, of a family.

    Attributes:
        preset: a preset of the family by name; None is as :func:`.plan.preset_for` says.
        impls: implementation names, ours or ``provider.variant``, in their order; None is all that run on the device.
        baselines: names of baselines, ("none",) for none, None for all of the family.
        sustained: whether each case is also called until clocks and power settle, see :mod:`.sustained`.
        shard: (i, n): of the cases, the i-th, and every n-th after it.
    """

    kernel: str = "tfla"
    preset: str | None = None
    impls: Names = None
    baselines: Names = None
    sustained: bool = False
    shard: tuple[int, int] = (1, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Triton:
    """A Triton to measure with.

    Attributes:
        folder: what comes first on a worker's path, as `pip install --no-deps --target FOLDER triton` makes it; None is
            the installed one.
    """

    version: str
    folder: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepOptions:
    """How a sweep runs, and where its rows go.

    Attributes:
        tritons: each case is measured once with each of these, in turn, on one GPU; none: with the installed one.
        retry: whether ``resume`` runs those that failed again. If not, cases that cannot be tried here are left out as
            well where the folder has any row of them.
    """

    gpu: Annotated[str | None, GPU] = None
    pairs: Annotated[
        bool | None,
        Option("Afterwards time the fastest of each package at each problem in turn: ratios are of pairs [on a GPU]."),
    ] = None
    budget_s: Annotated[float | None, Option("Seconds of timing per case.", least=0.0)] = None
    timeout_s: Annotated[float, TIMEOUT] = 120.0
    time_limit_s: Annotated[
        float, Option("Seconds after which no case starts; --resume runs the rest.", least=0.0, says_default=False)
    ] = math.inf
    resume: Annotated[bool, Option("Skip cases that --output already has from this code.")] = False
    jobs: Annotated[int | None, Option("Processes that compile ahead on a GPU [cores, at most 16].", least=0)] = None
    executor: Annotated[str, Option("local or ray.")] = "local"
    devices: Annotated[int, Option("GPUs to spread the cases over.", least=1)] = 1
    output: Annotated[Path, FOLDER] = LOCAL
    wait: Annotated[bool, Option("If another lrbench uses the GPU or --output, wait instead of exiting with 2.")] = (
        False
    )
    calibrate: Annotated[bool | None, Option("Measure the device's roofs first, beside the rows [on a GPU].")] = None
    profile_harness: Annotated[bool, Option("Say where the time went and how many kernels were compiled.")] = False
    tritons: tuple[Triton, ...] = ()
    retry: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeOptions:
    """How a function of a user's is measured."""

    mode: Annotated[str, Option("fw, or fwbw: also the gradients of floating-point arguments.")] = "fw"
    reference: Annotated[
        str | None, Option("MODULE:FUNCTION that takes the same arguments and gives what the results are held to.")
    ] = None
    name: Annotated[str | None, Option("The row's impl [MODULE:FUNCTION].")] = None
    device: Annotated[str | None, Option("cpu or cuda [cuda where there is a GPU].")] = None
    gpu: Annotated[str | None, Option("Accelerator whose model time the row has; see `lrbench gpus`.")] = None
    seed: Annotated[int, Option("Of the normal values of floating-point arguments; integers count from 0.")] = 0
    rounds: Annotated[int | None, Option("Samples [until their interval is narrow].", least=3)] = None
    budget_s: Annotated[float, Option("Seconds of timing.", least=0.0)] = 2.0
    timeout_s: Annotated[float, TIMEOUT] = 120.0
    output: Annotated[Path, FOLDER] = LOCAL
