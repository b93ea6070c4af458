# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""Compiles the experts' Triton kernels for a GPU that need not be there.

A program, since a CPU build of vLLM imports no Triton: arguments are a compute
capability, such as 90, and a folder for the cubin and PTX of every configuration.
"""

import sys
from pathlib import Path

# Hidden size and an expert's width.
WIDTHS = {"gate-up": (512, 2048), "down": (2048, 512)}
_POINTERS = {
    "x": "*bf16",
    "weight": "*i64",
    "weight_scale": "*u8",
    "alpha": "*fp32",
    "out": "*bf16",
    "pairs": "*i32",
    "tile_experts": "*i32",
}


def main(capability: int, folder: Path) -> None:
    """Writes NAME-T.cubin and .ptx for both GEMMs and each width of tiles."""
    import triton
    import triton.language as tl
    import vllm.triton_utils

    vllm.triton_utils.triton, vllm.triton_utils.tl = triton, tl
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from vllm.models.flint.ops.experts.grouped_config import picked_configs
    from vllm.models.flint.ops.experts.grouped_kernel import grouped_gemm

    names = grouped_gemm.arg_names
    aligned = {(names.index(name),): [["tt.divisibility", 16]] for name in _POINTERS}
    for config in picked_configs(divmod(capability, 10)):
        for name, gemm in (("gate-up", config.gate_up), ("down", config.down)):
            n, k = WIDTHS[name]
            constants = {
                "N": n,
                "K": k,
                "SHARE": 6 if name == "gate-up" else 1,
                "GATED": name == "gate-up",
                "PACKED": True,
                "PDL": capability >= 90,
                "BLOCK_N": gemm.block_n,
                "BLOCK_T": config.block_t,
                "BLOCK_K": gemm.block_k,
            }
            types = _POINTERS | {"num_pairs": "i32"} | dict.fromkeys(constants)
            signature = {name: types[name] or "constexpr" for name in names}
            source = ASTSource(
                grouped_gemm,
                signature=signature,
                constexprs=constants,
                attrs=aligned,
            )
            built = triton.compile(
                source,
                target=GPUTarget("cuda", capability, 32),
                options={"num_warps": gemm.warps, "num_stages": gemm.stages},
            )
            path = folder / f"{name}-{config.block_t}"
            path.with_suffix(".cubin").write_bytes(built.asm["cubin"])
            path.with_suffix(".ptx").write_text(built.asm["ptx"])
            path.with_suffix(".shared").write_text(str(built.metadata.shared))


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
