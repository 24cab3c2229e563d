"""The count command: every family and formulation is reachable, and bad input is one clear line."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from lrbench.analysis.cli_commands import register
from lrbench.analysis.counts import FORMULATIONS
from lrbench.bench.inventory import resolve_operation

PUBLISHED = (
    "tfla --op mlstm_sig --formulation chunkwise --seq-len 8192 --batch 1 --num-heads 1 --head-dim-qk 256 "
    "--head-dim 512 --chunk-size 128 --causal-factor 0.5 --dtype bf16 --state-dtype fp32 --mode fw"
)


def run(*arguments: object) -> str:
    """Run the command."""
    app = typer.Typer()
    app.command("other")(lambda: None)
    register(
        app,
        show=lambda rows, _: print(json.dumps(list(rows))),
        resolve_operation=resolve_operation,
        implementations=lambda op: (),
        why_unsupported=lambda *_: None,
    )
    result = CliRunner().invoke(app, ["count", *map(str, arguments)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


@pytest.mark.parametrize(
    ("arguments", "operation", "part"),
    [
        ("rglru", "rglru", "recurrence"),
        ("rglru --op linear_scan", "linear_scan", "recurrence"),
        ("rglru --formulation unfused --counting published --channels 1024", "rglru", "gate GEMMs"),
        ("wkv --formulation scan", "wkv4", "scan"),
        ("wkv4 --mode step", "wkv4", "state"),
        ("gated-mlp --formulation cublas_activation --mode bw", "gated_mlp", "weight gradients"),
        ("lightning --formulation lightning1 --dtype fp32", "lightning", "decays"),
        ("lightning --formulation lightning2 --mode fwbw --dtype fp32", "lightning", "backward: score gradient"),
        ("rglru --formulation chunked --chunk-size 256", "rglru", "recurrence"),
        ("rglru --op linear_scan --formulation chunked --mode bw", "linear_scan", "decay gradient"),
        ("attention --non-causal", "attention", "softmax"),
        ("gla", "gla", "gates"),
        ("retention", "retention", "state"),
        ("selective_scan --head-dim 1024", "selective_scan", "recurrence"),
    ],
)
def test_every_family_is_counted(arguments: str, operation: str, part: str) -> None:
    printed = json.loads(run(*arguments.split(), "--seq-len", "1k", "--format", "json"))
    assert printed["op"] == operation
    assert part in printed["parts"]
    assert sum(printed["parts"].values()) == pytest.approx(printed["flops"])
    assert sum(printed["byte_parts"].values()) == pytest.approx(printed["bytes"])
    assert printed["executed_tensor_flops"] is None


def test_count_says_what_the_kernels_run() -> None:
    walk = ("tfla", "--formulation", "walk", "--chunk-size", 1024)
    printed = json.loads(run(*walk, "--format", "json"))
    assert printed["executed_tensor_flops"] == sum(printed["executed_parts"].values()) > printed["tensor_flops"]
    assert "h: recomputed_scores" in printed["executed_parts"]
    assert '"part": "executed on tensor cores"' in run(*walk)
    older = json.loads(run(*walk, "--tile", "block_t=32", "--tile", "block_x=64", "--format", "json"))
    assert older["executed_parts"]["h: recomputed_intra"] > 0
    assert older["flops"] == printed["flops"]


@pytest.mark.parametrize(
    ("arguments", "part", "tile"),
    [
        ("lightning --formulation lightning1 --head-dim 128", "h: intra", "block_z=64"),
        ("lightning --formulation lightning2 --head-dim 128", "h: recomputed_scores", "block_z=16"),
        ("gated-mlp", "projection: products", None),
        ("gated-mlp --formulation fused_save --mode bw", "weight gradients: products", None),
    ],
)
def test_count_says_what_kernels_beside_the_engines_run(arguments: str, part: str, tile: str | None) -> None:
    printed = json.loads(run(*arguments.split(), "--format", "json"))
    assert part in printed["executed_parts"]
    assert sum(printed["executed_byte_parts"].values()) == printed["executed_bytes"]
    assert '"part": "executed on tensor cores"' in run(*arguments.split())
    if tile:
        other = json.loads(run(*arguments.split(), "--tile", tile, "--format", "json"))
        assert other["executed_byte_parts"] == printed["executed_byte_parts"]
        assert other["executed_tensor_flops"] > printed["executed_tensor_flops"]
        assert other["reread_bytes"] > printed["reread_bytes"]


@pytest.mark.parametrize("counting", ["published", "detailed"])
def test_every_part_of_the_papers_table_is_printed(counting: str) -> None:
    printed = json.loads(run(*PUBLISHED.split(), "--counting", counting, "--format", "json"))
    assert set(printed) >= {"flops", "bytes", "intensity", "parts", "byte_parts", "tensor_flops", "vector_flops"}
    assert list(printed["parts"]) == [
        "inter-chunk gates",
        "state",
        "intra-chunk forget gates",
        "gate matrix",
        "intra-chunk outputs",
        "inter-chunk outputs",
        "combination",
    ]
    assert sum(printed["parts"].values()) == printed["flops"] == 5129724224 + 64 * (128 - 4) * (counting == "detailed")
    assert printed["intensity"] == printed["flops"] / printed["bytes"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("rglru --op wkv4", "op must be one of rglru, linear_scan, rglru_layer for rglru, got 'wkv4'"),
        ("wkv --counting published", "counting must be detailed for wkv4, recurrent, fw: no paper prints a total"),
        ("gated-mlp --d-ff 0", "d_ff must be a positive integer, got 0"),
        ("gated-mlp --formulation scan", "formulation of gated_mlp must be one of fused, .*, got 'scan'"),
        ("tfla --non-causal", "causal must be left on for mlstm_sig"),
        ("tfla --tile block_t=32", "tile must be left out for the formulation chunkwise, got 'block_t=32'"),
        ("tfla --formulation walk --tile block_t=33", "tile block_t must be a power of two >= 16, got '33'"),
        (
            "lightning --formulation lightning1 --head-dim 128 --tile block_x=64",
            "tile must be one that lightning1 has, got block_x=64",
        ),
        ("gated-mlp --tile block_t=32", "tile must be left out for the formulation fused, got 'block_t=32'"),
        ("rglru --formulation chunked --seq-len 64 --chunk-size 128", "chunk_size must be <= seq_len = 64, got 128"),
        ("tfla --op ema", "op must be one of mlstm_sig, .*, got 'ema'"),
    ],
)
def test_bad_input_is_one_clear_line(arguments: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        run(*arguments.split())
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "arguments", ["rglru --channels 1024", "tfla --formulation walk --seq-len 64k --chunk-size 64k"]
)
def test_the_real_command_is_quick_and_imports_no_numerics(arguments: str) -> None:
    code = (
        "import sys; from lrbench.cli import app;"
        f"app({['count', *arguments.split(), '--format', 'json']!r}, standalone_mode=False);"
        "heavy = {'torch', 'triton', 'numpy', 'pandas', 'pyarrow', 'matplotlib', 'sympy'} & set(sys.modules);"
        "assert not heavy, heavy"
    )
    best = float("inf")
    for _ in range(3):
        start = time.perf_counter()
        subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
        best = min(best, time.perf_counter() - start)
    assert best < 1.0


def test_the_page_names_every_operation_and_formulation() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "counts.md").read_text(encoding="utf-8")
    missing = {name for op, known in FORMULATIONS.items() for name in (op, *known) if f"`{name}`" not in page}
    assert not missing


def test_the_real_command_ends_with_2_on_bad_input() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "from lrbench.cli import main; main()", "count", "wkv", "--counting", "published"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1 and "no paper prints a total" in done.stderr
