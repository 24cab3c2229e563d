"""Training steps of models: all implementations compute one model, its loss falls, and a step becomes a row."""

from __future__ import annotations

import dataclasses
import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from lrbench import kernels
from lrbench.bench.plan import PlannedCase, Request, package_of, plan, remarks
from lrbench.bench.worker import correctness, models, worker
from lrbench.bench.worker.protocol import RunLimits
from lrbench.kernels import resolve
from lrbench.kernels.baselines import get_implementation, get_operation
from lrbench.kernels.common.spec import LANGUAGE_MODELS, XLSTM_MODELS
from lrbench.results.documents import lengths_of
from lrbench.results.schema import Case
from lrbench.results.store import read_results
from lrbench.tests.command_line import Lrbench

HEADS = {"num_heads": 2, "head_dim_qk": 16, "head_dim_v": 16}
XLSTM = ("mlstm_exp", "mlstm_sig", "simple_gla", "retention", "gated_retention")
CHANNELS = {"channels": 32}
SIZES = dict.fromkeys(("attention", "lightning", *XLSTM), HEADS) | dict.fromkeys(("rglru", "wkv4"), CHANNELS)
"""Operation -> small sizes of a model's width."""


def planned(op: str, impl: str, dtype: str = "fp32", **sizes: Any) -> PlannedCase:
    target = get_implementation(op, impl)
    sizes = {"batch": 2, "seq_len": 21, "layers": 2, **SIZES[op], **sizes}
    names = {"kernel": get_operation(op).kernel, "op": op, "impl": impl, "provider": package_of(target)}
    return PlannedCase(case=Case(**names, mode="train", dtype=dtype, **sizes), target=target)


def step_of(item: PlannedCase, mix: Any = None) -> models.TrainingStep:
    """Return the step, of the implementation or of ``mix``."""
    operation = get_operation(item.case.op)
    inputs = operation.make_inputs({**item.case.sizes, "seq_len": 1}, dtype=correctness.DTYPES[item.case.dtype])
    return models.TrainingStep(item.case, inputs, mix or worker.mixing(item, inputs))


def gradients(step: models.TrainingStep) -> dict[str, Tensor]:
    """Return the loss and its gradients by layer: that of a gate's bias alone is a sum of terms that cancel."""
    loss = step.model(step.tokens[:, :-1], step.tokens[:, 1:])
    parameters = dict(step.model.named_parameters())
    layers: dict[str, list[Tensor]] = {}
    for name, found in zip(parameters, torch.autograd.grad(loss, list(parameters.values())), strict=True):
        layers.setdefault(name.rpartition(".")[0], []).append(found.flatten())
    return {"loss": loss.detach(), **{name: torch.cat(found) for name, found in layers.items()}}


PORTABLE = [
    ("attention", "torch.sdpa_cpu"),
    *((op, each.name) for op in list(SIZES)[1:] for each in get_operation(op).implementations if "cpu" in each.devices),
]
KERNELS = [("lightning", "lightning2"), ("mlstm_exp", "fused_chunk"), ("rglru", "fused"), ("wkv4", "scan")]
INTERPRETED = [pytest.param(*each, marks=pytest.mark.interpret) for each in KERNELS]


@pytest.mark.parametrize(("op", "impl"), [*PORTABLE, *INTERPRETED])
def test_every_implementation_trains_the_same_model(op: str, impl: str) -> None:
    """Loss and all gradients, to the error that the definition makes in float32."""
    item = planned(op, impl, layers=1 if (op, impl) in KERNELS else 2)
    definition = resolve(get_operation(op).recurrent)
    double = dataclasses.replace(item, case=dataclasses.replace(item.case, dtype="fp64"))
    exact, low = gradients(step_of(double, definition)), gradients(step_of(item, definition))
    for name, value in gradients(step_of(item)).items():
        bound = correctness.error_bound(correctness.relative_error(low[name], exact[name]), exact[name], torch.float32)
        assert correctness.relative_error(value, exact[name]) <= bound, name


@pytest.mark.parametrize(("op", "impl"), [("mlstm_exp", "torch"), ("retention", "parallel"), ("attention", "")])
def test_packed_documents_are_trained_as_if_alone(op: str, impl: str) -> None:
    """The loss is the mean over all tokens of the documents' own: nothing is mixed, and rotations begin anew."""
    definition = resolve(get_operation(op).recurrent)

    def loss(tokens: Tensor, documents: str | None = None) -> Tensor:
        """Return that of weights that are always the same, on tokens [1, T + 1] with those that follow."""
        length = tokens.shape[1] - 1
        item = planned(op, impl or "torch.sdpa_cpu", "fp64", batch=1, seq_len=length, documents=documents)
        alone = partial(correctness.each_document, definition, lengths_of(documents, length) if documents else [length])
        return step_of(item, None if impl else alone).model(tokens[:, :-1], tokens[:, 1:]).detach()

    tokens = torch.randint(1024, (1, 22), generator=torch.Generator().manual_seed(0))
    losses = [(n, loss(tokens[:, end - n : end + 1])) for n, end in ((5, 5), (8, 13), (8, 21))]
    mean = sum(n * each for n, each in losses) / 21
    torch.testing.assert_close(loss(tokens, "5+2x8"), mean, rtol=1e-12, atol=0)
    assert (loss(tokens) - mean).abs() > 1e-6


def test_a_step_of_packed_documents_is_checked_and_timed() -> None:
    item = planned("mlstm_sig", "torch", batch=1, documents="3")
    (reply,) = worker.Worker("cpu").run([item], RunLimits(timeout_s=60.0))
    assert (reply["status"], reply["columns"]["checked"]) == ("ok", correctness.SAME_SHAPE)


def test_logits_are_capped() -> None:
    """However large the head's weights, a wrong guess costs at most twice the cap and log(vocabulary)."""
    step = step_of(planned("mlstm_sig", "torch"))
    step.model.head[1].weight.data *= 1e4
    assert gradients(step)["loss"] > 1000
    step.model.logit_cap = get_operation("mlstm_sig").model({"channels": 768}).logit_cap
    assert gradients(step)["loss"] < 60 + math.log(1024)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize(("op", "impl"), dict(reversed(PORTABLE)).items())
def test_the_loss_falls(op: str, impl: str, dtype: str) -> None:
    """On one batch with every step; weights stay float32, and the first loss is that of guessing, log(vocabulary)."""
    step = step_of(planned(op, impl, dtype))
    losses = [float(step()) for _ in range(4)]
    assert losses == sorted(losses, reverse=True)
    assert losses[0] - losses[-1] > 0.05
    assert losses[0] == pytest.approx(6.93, abs=0.5)
    assert {parameter.dtype for parameter in step.model.parameters()} == {torch.float32}


@pytest.mark.parametrize(
    ("op", "sizes", "millions"),
    [
        *(
            (op, {"num_heads": width // 128, "head_dim_qk": 128, "head_dim_v": 128}, millions)
            for width, *both in zip(LANGUAGE_MODELS, (439, 1084, 2865), (446, 1076, 2886), strict=True)
            for op, millions in zip(("attention", "lightning"), both, strict=True)
        ),
        *(
            ("mlstm_sig", {"num_heads": width // 128, "head_dim_qk": 64, "head_dim_v": 128}, millions)
            for width, millions in zip(XLSTM_MODELS, (163, 412, 1441, 6897), strict=True)
        ),
        ("rglru", {"channels": 1024}, 195),
        # Called 169M by its authors.
        ("wkv4", {"channels": 768}, 169),
    ],
)
def test_published_models_have_their_size(op: str, sizes: dict[str, int], millions: int) -> None:
    operation = get_operation(op)
    published = operation.model(sizes)
    names = {"kernel": "", "op": op, "impl": "", "provider": "", "mode": "train", "dtype": "bf16"}
    case = Case(**names, seq_len=4, layers=published.layers, **sizes)
    inputs = operation.make_inputs({"batch": 1, "seq_len": 1, **sizes}, dtype=torch.bfloat16)
    with torch.device("meta"):
        model = models.MixerModel(case, inputs, print, published)
    assert sum(x.numel() for x in model.parameters()) / 1e6 == pytest.approx(millions, abs=1)


def test_a_step_is_a_row(lrbench: Lrbench, tmp_path: Any) -> None:
    """Swept, stored and drawn as anything else: the operation is checked, at a small shape."""
    command = ("sweep", "--kernel", "wkv", "--mode", "train", "--channels", "32", "--impl", "torch", "--budget", 0)
    assert lrbench(*command, "--seq-len", "16,64", "--tokens", 32, "--output", tmp_path)[0] == 0
    rows = read_results(tmp_path).to_pylist()
    assert [row["seq_len"] for row in rows] == [16, 64]
    for row in rows:
        assert (row["status"], row["mode"], row["layers"], row["chunk_size"]) == ("ok", "train", 2, None)
        assert row["batch"] * row["seq_len"] == max(32, row["seq_len"])
        assert len(row["time_samples_ms"]) >= 2
        assert row["host_ms"] is row["flops"] is None
        assert 0 < row["rel_error"] < 1e-5
        # Weights and both averages of AdamW are there before a step, gradients in it; and the words.
        weights = 2 * 1024 * 32 + 2 * (13 * 32**2 + 11 * 32) + 4 * 32
        assert row["input_bytes"] == pytest.approx(12 * weights, rel=0.02)
        assert row["peak_memory_bytes"] > row["input_bytes"] + 4 * weights
    code, _, err = lrbench("plot throughput", tmp_path, "--mode", "train", "-o", tmp_path / "a.svg")
    assert code == 0, err
    drawn = (tmp_path / "a.svg").read_text()
    assert "throughput (thousand tokens/s)" in drawn and "2 layers" in drawn


@pytest.mark.parametrize(
    ("outcome", "status", "reason"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried"), "oom", "CUDA out of memory"),
        (torch.tensor(float("nan")), "incorrect", "the loss of a training step is nan"),
    ],
)
def test_what_goes_wrong_in_a_step_is_its_status(
    monkeypatch: pytest.MonkeyPatch, outcome: Any, status: str, reason: str
) -> None:
    def fail(step: models.TrainingStep) -> Tensor:
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    monkeypatch.setattr(models.TrainingStep, "__call__", fail)
    (reply,) = worker.Worker("cpu").run([planned("wkv4", "torch")], RunLimits(timeout_s=1.0))
    assert (reply["status"], reply["reason"]) == (status, reason)


def test_published_layers_are_planned() -> None:
    """As many as the model of that width has, unless some are asked for; nothing for operations without a model."""
    cases = partial(plan, device_kind="cuda")
    beside = {"lightning": {"attention"}, "tfla": {"mlstm_exp", "simple_gla", "attention"}}
    for kernel, layers in (("lightning", 24), ("rglru", 12), ("wkv", 12), ("tfla", 12)):
        train = cases(Request(kernel=kernel, modes=("train",)))
        assert train == cases(Request(kernel=kernel, preset="train"))
        assert {item.case.layers for item in train} == {layers}
        assert {item.case.op for item in train} - {kernels.FAMILIES[kernel][0]} == beside.get(kernel, set())
    assert remarks(Request(), train) == ["no training steps of mamba2_ssd: no model here has them in its blocks"]
    (few,) = cases(Request(kernel="wkv", preset="train", impls=("scan",), layers=3))
    assert few.case.layers == 3
    assert few.case.of_operation == dataclasses.replace(few.case, mode="fwbw", layers=None)
    with pytest.raises(ValueError, match="--layers is no axis of mode fw: a training step"):
        cases(Request(kernel="wkv", modes=("fw",), layers=3))
    with pytest.raises(ValueError, match="impl fused_chunk has no case in this sweep"):
        cases(Request(ops=("mamba2_ssd",), modes=("train",), impls=("fused_chunk",)))
