"""The commands about the gated MLP: errors, kv-savings. Each parses, calls and prints."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import typer

Format = Annotated[str, typer.Option("--format", help="table, json or csv.")]


def register(app: typer.Typer) -> None:
    """Add the commands to ``app``."""

    @app.command("errors")
    def errors_command(
        kernel: Annotated[str, typer.Argument(help="Kernel family: gated-mlp.")],
        size: Annotated[
            str | None, typer.Option(help="N of the square matrices [1k to 16k on a GPU; 256,512,1k on a CPU].")
        ] = None,
        draws: Annotated[int, typer.Option(min=1, help="Draws of all matrices.")] = 100,
        impl: Annotated[
            str | None,
            typer.Option(help="Ours, or definition: float32 inside, rounded once [fused; a CPU: both it and torch]."),
        ] = None,
        against: Annotated[
            str, typer.Option(help="eager: torch in the same dtype; exact: float64, for N up to 16k.")
        ] = "eager,exact",
        dtype: Annotated[str, typer.Option(help="bf16, fp16 or fp32.")] = "bf16",
        format: Format = "table",
    ) -> None:
        """Measure the errors of a fused kernel's results over random draws: largest, mean and relative."""
        import torch

        from ..results import arguments
        from . import display, mlp_errors

        display.check_format(format)
        if kernel != "gated-mlp":
            raise ValueError(f"kernel must be gated-mlp, the family whose source has such a table, got {kernel!r}")
        device = "cuda" if torch.cuda.is_available() else "cpu"
        if size is None:
            size = "1k,2k,4k,8k,16k" if device == "cuda" else "256,512,1k"
        impls = mlp_errors.default_implementations(device)
        rows = mlp_errors.error_rows(
            sizes=arguments.parse_sizes(size, "--size"),
            draws=draws,
            impls=impls if impl is None else arguments.parse_names(impl, "--impl"),
            against=arguments.parse_names(against, "--against"),
            dtype=dtype,
            device=device,
        )
        name = torch.cuda.get_device_name() if device == "cuda" else "the CPU: the Triton kernels need a GPU"
        display.note(f"computing on {name}; published: the source's kernel on an A100 against torch")
        display.show(list(rows), format)

    @app.command("kv-savings")
    def kv_savings_command(
        tokens: Annotated[str, typer.Option(help="Tokens of a chunk or of a prompt, comma-separated.")] = "512",
        dtype: Annotated[str, typer.Option(help="Dtype of activations: fp32, fp16, bf16 or fp8.")] = "bf16",
        kv_dtype: Annotated[str | None, typer.Option(help="Dtype of the cache [the activations'].")] = None,
        d_model: Annotated[int | None, typer.Option(help="A model of your own: model dim.")] = None,
        d_ff: Annotated[int | None, typer.Option(help="Its MLP dim.")] = None,
        layers: Annotated[int | None, typer.Option(help="Its layers.")] = None,
        kv_heads: Annotated[int | None, typer.Option(help="Its key-value heads.")] = None,
        head_dim: Annotated[int | None, typer.Option(help="Its head dim.")] = None,
        format: Format = "table",
    ) -> None:
        """Show what the fused MLP saves of a layer's activations, and the key-value cache that memory holds."""
        from ..analysis.counts import kv_savings
        from ..results import arguments
        from . import display

        display.check_format(format)
        own = {"d_model": d_model, "d_ff": d_ff, "layers": layers, "kv_heads": kv_heads, "head_dim": head_dim}
        given = {name: value for name, value in own.items() if value is not None}
        if given and len(given) < len(own):
            missing = ", ".join("--" + name.replace("_", "-") for name in own if name not in given)
            raise ValueError(f"a model of your own needs all of its sizes; missing: {missing}")
        models = (kv_savings.Model(name="own", **given),) if given else kv_savings.MODELS
        rows = [
            dataclasses.asdict(saving)
            for count in arguments.parse_sizes(tokens, "--tokens")
            for model in models
            for saving in kv_savings.savings(model, count, dtype=dtype, kv_dtype=kv_dtype)
        ]
        display.show(rows, format)
