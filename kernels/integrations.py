"""Our kernels inside the libraries that people train with: one call for each, which returns what undoes it.

    from lrbench.kernels.integrations import use_in_fla

    use_in_fla()  # from here on; its close() undoes it. Or for a while: with use_in_fla(): ...

A library's function is replaced under its name in every module that has it by then, or registered where the library
has a registry. What holds the function itself, such as a model that mlstm_kernels' registry built earlier, keeps it.
A call with arguments that ours does not take runs the original, and a RuntimeWarning that names the argument says so
once. The libraries are imported by these calls alone.
"""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from functools import partial, wraps
from importlib import import_module
from inspect import signature, unwrap
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    Function = Callable[..., Any]

__all__ = ["use_in_fla", "use_in_mamba_ssm", "use_in_mlstm_kernels", "use_in_transformers"]

MAX_EPS = 1e-6
"""mlstm_kernels adds eps to the denominator; ours adds nothing, which up to this eps is a matter of rounding."""


class Integration:
    """Functions of one library that ours replace while it is in use."""

    def __init__(self, name: str, tested: str, install: Callable[[Integration, ExitStack], None]) -> None:
        self.name, self.tested, self.install = name, tested, install
        self.on = False
        self.warned: set[tuple[str, str]] = set()

    def use(self) -> ExitStack:
        """Replace the functions, if they are not replaced already; return what undoes just that.

        Raises:
            ImportError: if the library, or a function of it, is not there; it names the versions that are known.
        """
        undo = ExitStack()
        if self.on:
            return undo
        try:
            self.install(self, undo)
        except (ImportError, AttributeError, KeyError) as error:
            undo.close()
            expected = f"use_in_{self.name} needs {self.tested}, the versions tried: pip install them"
            raise ImportError(f"{expected} ({type(error).__name__}: {error})", name=self.name) from error
        self.on = True
        undo.callback(setattr, self, "on", False)
        return undo

    def instead_of(self, original: Function, ours: Function) -> Function:
        """Return a function that calls ours, by keywords; while not in use, or where ours refuses, the original."""
        names = tuple(signature(original).parameters)

        @wraps(original)
        def call(*args: Any, **keywords: Any) -> Any:
            if self.on:
                try:
                    return ours(**dict(zip(names, args, strict=False)), **keywords)
                except ValueError as refusal:
                    self.warn(original.__name__, str(refusal))
            return original(*args, **keywords)

        return call

    def warn(self, function: str, refusal: str) -> None:
        """Say once for each argument, the refusal's first word, that the original runs."""
        key = function, refusal.partition(" ")[0]
        if key not in self.warned:
            self.warned.add(key)
            message = f"{function} runs {self.name}'s own kernel, since for lrbench's {refusal}"
            warnings.warn(message, RuntimeWarning, stacklevel=4)

    def replace(self, undo: ExitStack, original: Function, ours: Function) -> None:
        """Put ours in the place of the original in all modules that have it under its name."""
        name, mine = original.__name__, self.instead_of(original, ours)
        for module in [*sys.modules.values()]:
            held = getattr(module, "__dict__", {})
            if held.get(name) is original:
                put(undo, held, name, mine)

    def replace_in(self, undo: ExitStack, registry: dict[str, Function], ours: Mapping[str, Function]) -> None:
        """Put ours in the place of the functions of these names in a registry, which may lack some."""
        for name in ours.keys() & registry.keys():
            put(undo, registry, name, self.instead_of(registry[name], ours[name]))


def put(undo: ExitStack, held: dict[str, Any], name: str, value: Any) -> None:
    """Set an entry of a dict until ``undo`` closes."""
    undo.callback(held.__setitem__, name, held[name])
    held[name] = value


def use_in_fla() -> ExitStack:
    """Run fla's simple GLA, retention, Lightning Attention, linear attention and Mamba-2 on our kernels.

    fla's registry of backends has the recurrent, fused and parallel forms of simple GLA, the function for training is
    replaced; the other operations call these. Mamba-2 is mamba_ssm's, which this replaces too if it is there.

    Returns:
        What undoes it: with its ``close()``, or at the end of a ``with``.

    Raises:
        ImportError: if fla is not installed, or another version lacks one of the functions.
    """
    return FLA.use()


def use_in_mlstm_kernels() -> ExitStack:
    """Run models that mlstm_kernels' registry of kernels builds from now on, such as xlstm's, on our kernels.

    These are mLSTMBackend's chunkwise, sequence and step kernels, in Triton and torch. ``native_autograd`` and
    ``native`` differentiate through the denominator, which ours do not, so with gradients they stay as they are, and
    the sigmoid input gate is taken with normalize_siging=False.

    Returns, Raises: as :func:`use_in_fla`.
    """
    return MLSTM_KERNELS.use()


def use_in_mamba_ssm() -> ExitStack:
    """Run Mamba-2 of mamba_ssm on our kernels: mamba_chunk_scan_combined and mamba_split_conv1d_scan_combined.

    A decoding step, selective_state_update, stays mamba_ssm's: it overwrites its state. transformers' Mamba-2 takes
    these functions when it is first imported, so import it afterwards.

    Returns, Raises: as :func:`use_in_fla`.
    """
    return MAMBA_SSM.use()


def use_in_transformers() -> ExitStack:
    """Run xLSTM models that transformers builds from now on, without the xlstm package, on our kernels.

    With xlstm installed they run on mlstm_kernels: :func:`use_in_mlstm_kernels`. Its torch forms differentiate through
    the denominator, which ours do not, so training stays as it is; decoding and what is under no_grad is ours.

    Returns, Raises: as :func:`use_in_fla`.
    """
    return TRANSFORMERS.use()


def refuse(**arguments: Any) -> None:
    """Raise ValueError, naming it, on an argument that is neither None nor False."""
    for name, value in arguments.items():
        if value is not None and value is not False:
            raise ValueError(f"{name} must be None or False")


def needs_gradient(*tensors: Tensor | None) -> bool:
    """Return whether autograd will want gradients of one of the tensors."""
    import torch

    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def step_for_one(v: Tensor, *tensors: Tensor | None, cu_seqlens: Tensor | None = None) -> str | None:
    """Return the implementation of a call: a decoding step, which has no gradient, for one token, else None."""
    return "step" if v.shape[1] == 1 and cu_seqlens is None and not needs_gradient(v, *tensors) else None


def simple_gla_of_fla(
    *,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    g_gamma: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    chunk_size: int | None = None,
    **others: Any,
) -> tuple[Tensor, Tensor | None]:
    """Compute any form of fla's simple GLA, with fla's arguments.

    Args:
        q, k, v: [B, T, H, D].
        g, g_gamma: log decays of each step [B, T, H], or of each head [H], which get no gradient; one of them or none.
        initial_state: [N, H, K, V], or [N, H, V, K] with ``state_v_first``, as the final state then is.
        cu_seqlens_cpu, chunk_size: not needed; ours chooses its own chunks.

    Returns:
        h [B, T, H, V], and the final state or None.
    """
    import torch

    from .retention import retention
    from .simple_gla import simple_gla

    refuse(**others)
    if g is not None:
        refuse(g_gamma=g_gamma)
    state = None if initial_state is None else (initial_state.mT if state_v_first else initial_state).float()
    keywords: dict[str, Any] = {
        "impl": step_for_one(v, q, k, g, state, cu_seqlens=cu_seqlens), "scale": scale, "initial_state": state,
        "return_last_state": output_final_state, "cu_seqlens": cu_seqlens,
    }  # fmt: skip
    if g is not None:
        result: Any = simple_gla(q, k, v, g.float(), **keywords)
    else:
        decay = torch.zeros(v.shape[2], device=v.device) if g_gamma is None else g_gamma.detach().float()
        result = retention(q, k, v, -decay, **keywords)
    if not output_final_state:
        return result, None
    h, last = result
    # A view, which the next step turns back without a copy.
    return h, last.mT if state_v_first else last


def chunk_scan_of_mamba(
    *,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int | None = None,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    seq_idx: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, math.inf),
    return_final_states: bool = False,
    return_varlen_states: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute mamba_chunk_scan_combined: Mamba-2's scan with step sizes, skip D and output gate z.

    Args:
        x, z: [B, T, H, P]; dt: [B, T, H]; A, dt_bias: [H]; B, C: [B, T, G, N]; D: [H] or [H, P].
        initial_states: [B, H, P, N], as the final states are.
        seq_idx: the number of each token's document [B, T]; the state is zero where it changes.
        cu_seqlens: of the states that return_varlen_states asks for, which ours refuses.

    Returns:
        y [B, T, H, P], or y and the final states.
    """
    import torch
    from torch.nn import functional as F

    from .mamba2_ssd import mamba2_ssd

    refuse(return_varlen_states=return_varlen_states)
    bounds = None
    if seq_idx is not None:
        if return_final_states or initial_states is not None:
            raise ValueError("seq_idx must be None with initial or final states")
        # Every token names the first one of its document: the bounds, as often as it has tokens, without reading them.
        starts = torch.ones_like(seq_idx, dtype=torch.bool)
        starts[:, 1:] = seq_idx[:, 1:] != seq_idx[:, :-1]
        places = torch.arange(starts.numel(), device=starts.device)
        bounds = F.pad((places * starts.flatten()).cummax(0).values, (0, 1), value=starts.numel())
    step = dt.float() if dt_bias is None else dt.float() + dt_bias.float()
    step = F.softplus(step) if dt_softplus else step
    if tuple(dt_limit) != (0.0, math.inf):
        step = step.clamp(*dt_limit)
    state = None if initial_states is None else initial_states.mT.float()
    packed = (x, step, B, C) if bounds is None else tuple(each.flatten(0, 1)[None] for each in (x, step, B, C))
    result: Any = mamba2_ssd(
        packed[0], packed[1], A.float(), *packed[2:], initial_state=state, return_last_state=return_final_states,
        cu_seqlens=bounds,
    )  # fmt: skip
    y: Any = (result[0] if return_final_states else result).view(x.shape)
    if D is not None:
        y = y + x * (D if D.dim() == 2 else D[:, None])
    if z is not None:
        y = y * F.silu(z.float())
    y = y.to(x.dtype)
    return (y, result[1].mT.contiguous()) if return_final_states else y


def split_conv_scan_of_mamba(
    ops: Any,
    *,
    zxbcdt: Tensor,
    conv1d_weight: Tensor,
    conv1d_bias: Tensor | None,
    dt_bias: Tensor,
    A: Tensor,
    D: Tensor,
    seq_idx: Tensor | None = None,
    return_final_states: bool = False,
    activation: str | None = "silu",
    rmsnorm_weight: Tensor | None = None,
    rmsnorm_eps: float = 1e-6,
    outproj_weight: Tensor | None = None,
    outproj_bias: Tensor | None = None,
    headdim: int | None = None,
    ngroups: int = 1,
    norm_before_gate: bool = True,
    **scan: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute mamba_split_conv1d_scan_combined: convolution, scan, gated norm and output projection of a Mamba-2 layer.

    Args:
        ops: mamba_ssm.ops.triton.ssd_combined, whose norm and convolution are used; without causal_conv1d torch's is.
        zxbcdt: [B, T, 2 inner + 2 ngroups N + H] of the input projection: z, x, B, C and dt.
        conv1d_weight, conv1d_bias: [inner + 2 ngroups N, width], [inner + 2 ngroups N].
        D: [H, P], or [H] with headdim.
        scan: what :func:`chunk_scan_of_mamba` takes besides.

    Returns:
        The output [B, T, outer], or it and the final states.
    """
    from torch.nn import functional as F

    heads = D.shape[0]
    head_dim = headdim if D.dim() == 1 else D.shape[1]
    if head_dim is None:
        raise ValueError("headdim must be given where D has one dimension")
    inner, channels = heads * head_dim, conv1d_weight.shape[0]
    if zxbcdt.shape[-1] != inner + channels + heads:
        raise ValueError(f"zxbcdt must be z, x, B, C and dt alone, {inner + channels + heads} wide, without an MLP")
    z, conv, dt = zxbcdt.split([inner, channels, heads], dim=-1)
    if ops.causal_conv1d_fn is not None:
        conv = ops.causal_conv1d_fn(conv.mT, conv1d_weight, conv1d_bias, seq_idx=seq_idx, activation=activation).mT
    else:
        refuse(seq_idx=seq_idx)
        weight = conv1d_weight[:, None].to(conv.dtype)
        conv = F.conv1d(F.pad(conv.mT, (weight.shape[2] - 1, 0)), weight, groups=channels).mT
        conv = conv if conv1d_bias is None else conv + conv1d_bias.to(conv.dtype)
        conv = conv if activation is None else F.silu(conv)
    x, b, c = conv.split([inner, *[(channels - inner) // 2] * 2], dim=-1)
    x, b, c, z = (t.unflatten(-1, (n, -1)) for t, n in ((x, heads), (b, ngroups), (c, ngroups), (z, heads)))
    result: Any = chunk_scan_of_mamba(
        x=x, dt=dt, A=A, B=b, C=c, D=D, z=z if rmsnorm_weight is None else None, dt_bias=dt_bias,
        seq_idx=seq_idx, dt_softplus=True, return_final_states=return_final_states, **scan,
    )  # fmt: skip
    y: Any = (result[0] if return_final_states else result).flatten(2)
    if rmsnorm_weight is not None:
        y = ops.rmsnorm_fn(
            y, rmsnorm_weight, None, z=z.flatten(2), eps=rmsnorm_eps, group_size=inner // ngroups,
            norm_before_gate=norm_before_gate,
        )  # fmt: skip
    if outproj_weight is not None:
        y = F.linear(y, outproj_weight, outproj_bias)
    return (y, result[1]) if return_final_states else y


def mlstm_exp_of_mlstm_kernels(
    *,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    i: Tensor,
    f: Tensor,
    c_initial: Tensor | None = None,
    n_initial: Tensor | None = None,
    m_initial: Tensor | None = None,
    return_last_states: bool = False,
    eps: float = 0.0,
    autocast_kernel_dtype: Any = None,
    dtype_state: Any = None,
    through_denominator: bool = False,
    **tuning: Any,
) -> Any:
    """Compute an mLSTM kernel of mlstm_kernels with its arguments.

    Args:
        q, k, v: [B, H, T, D]; i, f: [B, H, T].
        c_initial, n_initial, m_initial: [B, H, K, V], [B, H, K], [B, H, 1]: all or none.
        autocast_kernel_dtype: dtype of q, k and v under autocast.
        dtype_state: dtype of the last states; None is float32, in which ours computes them.
        through_denominator: whether the original has the gradients of the denominator, which ours have not.
        tuning: chunk sizes, tiles and warps of the original.

    Returns:
        h [B, H, T, V], or h and (c, n, m).
    """
    from .mlstm_exp import mlstm_exp

    if not 0.0 <= eps <= MAX_EPS:
        raise ValueError(f"eps must be at most {MAX_EPS}, got {eps}")
    tensors = (q, k, v, i, f, c_initial, n_initial, m_initial)
    if through_denominator and needs_gradient(*tensors):
        raise ValueError("q, k, v, i and f must need no gradient: the original's passes the denominator")
    state = None
    if c_initial is not None and n_initial is not None and m_initial is not None:
        state = c_initial.float(), n_initial.float(), m_initial.float().squeeze(-1)
    arguments = time_first(q, k, v, i, f, autocast_kernel_dtype)
    impl = step_for_one(arguments[2], *tensors)
    result: Any = mlstm_exp(*arguments, impl=impl, initial_state=state, return_last_state=return_last_states)
    if not return_last_states:
        return result.transpose(1, 2)
    h, (c, n, m) = result
    return h.transpose(1, 2), tuple(x if dtype_state is None else x.to(dtype_state) for x in (c, n, m[..., None]))


def mlstm_sig_of_mlstm_kernels(
    *,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    i: Tensor,
    f: Tensor,
    c_initial: Tensor | None = None,
    return_last_states: bool = False,
    normalize: bool = True,
    autocast_kernel_dtype: Any = None,
    **tuning: Any,
) -> Tensor:
    """Compute the mLSTM kernel with a sigmoid input gate, without states and normalisation; return h [B, H, T, V]."""
    from .mlstm_sig import mlstm_sig

    refuse(normalize=normalize, c_initial=c_initial, return_last_states=return_last_states)
    h: Any = mlstm_sig(*time_first(q, k, v, i, f, autocast_kernel_dtype))
    return h.transpose(1, 2)


def step_of_mlstm_kernels(*, q: Tensor, k: Tensor, v: Tensor, c: Tensor, n: Tensor, m: Tensor, **others: Any) -> Any:
    """Compute a decoding step with mlstm_kernels' arguments: q, k, v [B, H, D], gates and m [B, H, 1]."""
    h, states = mlstm_exp_of_mlstm_kernels(
        q=q[:, :, None], k=k[:, :, None], v=v[:, :, None], c_initial=c, n_initial=n, m_initial=m,
        return_last_states=True, **others,
    )  # fmt: skip
    return h[:, :, 0], states


def time_first(q: Tensor, k: Tensor, v: Tensor, i: Tensor, f: Tensor, autocast_dtype: Any) -> list[Tensor]:
    """Return q, k, v and gates [B, T, H, ...] of those [B, H, T, ...], the former in autocast_dtype under autocast."""
    import torch

    dtype = autocast_dtype if torch.is_autocast_enabled(q.device.type) else None
    return [*(x.transpose(1, 2).to(dtype or x.dtype) for x in (q, k, v)), *(x.transpose(1, 2).float() for x in (i, f))]


def install_fla(fla: Integration, undo: ExitStack) -> None:
    """Register with fla's backends, which know three of the functions, and replace the fourth."""
    backends, ops = import_module("fla.backends"), import_module("fla.ops.simple_gla")
    is_enabled = {"is_enabled": lambda _: fla.on}
    backend = type("Lrbench", (backends.BaseBackend,), {"backend_type": "lrbench", "priority": -1, **is_enabled})
    for name in ("fused_recurrent_simple_gla", "fused_chunk_simple_gla", "parallel_simple_gla"):
        function = getattr(ops, name)
        backends.register(function, backend=backend)(fla.instead_of(unwrap(function), simple_gla_of_fla))
    fla.replace(undo, ops.chunk_simple_gla, simple_gla_of_fla)
    with suppress(ImportError):
        undo.enter_context(use_in_mamba_ssm())


def install_mamba_ssm(mamba: Integration, undo: ExitStack) -> None:
    """Replace the two functions of ssd_combined."""
    ops = import_module("mamba_ssm.ops.triton.ssd_combined")
    mamba.replace(undo, ops.mamba_chunk_scan_combined, chunk_scan_of_mamba)
    mamba.replace(undo, ops.mamba_split_conv1d_scan_combined, partial(split_conv_scan_of_mamba, ops))


def install_mlstm_kernels(mlstm: Integration, undo: ExitStack) -> None:
    """Replace the entries of the registries that get_mlstm_kernel and its like read."""
    ours, step = mlstm_exp_of_mlstm_kernels, step_of_mlstm_kernels
    autograd, step_autograd = (partial(each, through_denominator=True) for each in (ours, step))
    chunkwise: dict[str, Function] = dict.fromkeys(("native_custbw", "triton_limit_chunk", "triton_xl_chunk"), ours)
    chunkwise |= {"native_autograd": autograd, "triton_xl_chunk_siging": mlstm_sig_of_mlstm_kernels}
    mlstm.replace_in(undo, import_module("mlstm_kernels.torch.chunkwise").registry, chunkwise)
    recurrent = import_module("mlstm_kernels.torch.recurrent")
    sequence: dict[str, Function] = {"native_sequence__native": autograd, "native_sequence__triton": ours}
    mlstm.replace_in(undo, recurrent.registry_sequence, sequence)
    steps: dict[str, Function] = {"native": step_autograd, "triton": step}
    mlstm.replace_in(undo, recurrent.registry_step, steps)


def install_transformers(transformers: Integration, undo: ExitStack) -> None:
    """Replace the torch forms from which transformers' xLSTM builds its layers."""
    model = import_module("transformers.models.xlstm.modeling_xlstm")
    names = {name: name[0] for name in ("query", "key", "value", "igate", "fgate", "cstate", "nstate", "mstate")}

    def renamed(ours: Function, **arguments: Any) -> Any:
        return ours(through_denominator=True, **{names.get(name, name): x for name, x in arguments.items()})

    for function, ours in (
        (model.mlstm_chunkwise_native_autograd, mlstm_exp_of_mlstm_kernels),
        (model.mlstm_recurrent_sequence_native, mlstm_exp_of_mlstm_kernels),
        (model.mlstm_recurrent_step_native, step_of_mlstm_kernels),
    ):
        transformers.replace(undo, function, partial(renamed, ours))


FLA = Integration("fla", "fla-core==0.6.0 flash-linear-attention==0.6.0", install_fla)
MAMBA_SSM = Integration("mamba_ssm", "mamba-ssm==2.3.2.post1", install_mamba_ssm)
MLSTM_KERNELS = Integration("mlstm_kernels", "mlstm_kernels==2.0.6", install_mlstm_kernels)
TRANSFORMERS = Integration("transformers", "transformers==5.24.0 without xlstm", install_transformers)
