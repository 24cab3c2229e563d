"""Tile sizes of the engine's kernels: one frozen value a launch, and one predicate that says where it is valid."""

from __future__ import annotations

from dataclasses import dataclass, replace

SHARED_MEMORY_BYTES = {
    (8, 0): 163 * 1024,
    (8, 6): 99 * 1024,
    (8, 9): 99 * 1024,
    (9, 0): 227 * 1024,
    (10, 0): 227 * 1024,
}
"""Shared memory a block may use, by compute capability."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StatesConfig:
    """Launch of the recurrent kernel: time tile, state tile, warps, pipeline stages."""

    block_t: int
    block_k: int
    block_v: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MixConfig:
    """Launch of the parallel kernel: row tile, column tile, contraction block, output block, warps, stages."""

    block_t: int
    block_s: int
    block_x: int
    block_z: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WalkConfig:
    """Launch of the walking kernel: time tile, output block, warps, pipeline stages."""

    block_t: int
    block_z: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Every launch of one forward and backward pass.

    The four products either all sweep (MixConfig) or all walk (WalkConfig, with one common block_t).
    """

    states: StatesConfig
    d_states: StatesConfig
    output: MixConfig | WalkConfig
    dq: MixConfig | WalkConfig
    dk: MixConfig | WalkConfig
    dv: MixConfig | WalkConfig

    def gate_chunk(self, chunk: int) -> int:
        """Return the stretch over which gate vectors accumulate: a chunk when sweeping, a tile when walking."""
        return self.output.block_t if isinstance(self.output, WalkConfig) else chunk


def next_power_of_two(n: int) -> int:
    """Return the smallest power of two >= n."""
    return 1 << max(n - 1, 0).bit_length()


def fit_chunk(chunk_size: int, seq_len: int) -> int:
    """Return the chunk length in force: never longer than the sequence's next power of two (at least 16)."""
    return min(chunk_size, max(16, next_power_of_two(seq_len)))


def select_config(
    *, capability: tuple[int, int], item_bytes: int, head_dim_qk: int, head_dim_v: int, chunk: int, rows: int = 0
) -> EngineConfig:
    """Choose the launches for an architecture and problem.

    Args:
        capability: compute capability of the device, such as (9, 0).
        item_bytes: bytes of one input element: 2 (bf16, fp16) or 4 (fp32).
        head_dim_qk: K.
        head_dim_v: V.
        chunk: chunk length in force, a power of two >= 16.
        rows: batch * heads, used to fill the chip with smaller state tiles when there are few.

    Returns:
        the launches; tiles never exceed the chunk or the padded head dims.
    """
    k_pad, v_pad = max(16, next_power_of_two(head_dim_qk)), max(16, next_power_of_two(head_dim_v))
    if item_bytes == 4:
        tile, cap, state_cap, warps, stages = 32, 32, 32, 4, 1
        states = StatesConfig(block_t=32, block_k=state_cap, block_v=state_cap, num_warps=warps, num_stages=stages)
        mix = MixConfig(block_t=tile, block_s=tile, block_x=cap, block_z=cap, num_warps=warps, num_stages=stages)
        configs = {"states": states, "d_states": states, "output": mix, "dq": mix, "dk": mix, "dv": mix}
    else:
        states = StatesConfig(block_t=64, block_k=64, block_v=64, num_warps=4, num_stages=3)
        mix = MixConfig(block_t=64, block_s=64, block_x=128, block_z=128, num_warps=4, num_stages=2)
        if capability < (9, 0):
            mix = replace(mix, block_x=64, block_z=64)
        configs = {"states": states, "d_states": states, "output": mix, "dq": mix, "dk": mix, "dv": mix}

    def fit_states(config: StatesConfig) -> StatesConfig:
        return replace(
            config,
            block_t=min(config.block_t, chunk),
            block_k=min(config.block_k, k_pad),
            block_v=min(config.block_v, v_pad),
        )

    def fit_mix(config: MixConfig, dx: int, dz: int) -> MixConfig:
        return replace(
            config,
            block_t=min(config.block_t, chunk),
            block_s=min(config.block_s, chunk, min(config.block_t, chunk)),
            block_x=min(config.block_x, dx),
            block_z=min(config.block_z, dz),
        )

    return EngineConfig(
        states=fit_states(configs["states"]),
        d_states=fit_states(configs["d_states"]),
        output=fit_mix(configs["output"], k_pad, v_pad),
        dq=fit_mix(configs["dq"], v_pad, k_pad),
        dk=fit_mix(configs["dk"], v_pad, k_pad),
        dv=fit_mix(configs["dv"], k_pad, v_pad),
    )
