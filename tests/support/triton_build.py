# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""Compiles the Triton kernels of the grouped GEMM for a GPU that need not be there.

A program, since a CPU build of vLLM imports no Triton: arguments are a compute
capability, such as 90, and a folder for the cubin and PTX of every configuration.
"""

import itertools
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HIDDEN, WIDTH, TOP_K = 2048, 512, 6
_TYPES = {
    "x": "*bf16",
    "weight": "*i64",
    "weight_scale": "*u8",
    "alpha": "*fp32",
    "out": "*bf16",
    "pairs": "*i32",
    "tile_experts": "*i32",
    "ids": "*i32",
    "y": "*bf16",
    "weights": "*fp32",
    "shared": "*bf16",
    "num_pairs": "i32",
    "tiles": "i32",
    "stride": "i32",
    "width": "i32",
    "shared_stride": "i32",
}


@dataclass(frozen=True)
class Built:
    """A kernel to compile: its name in the folder, its constants and its launch."""

    name: str
    kernel: Any
    constants: dict[str, int]
    warps: int
    stages: int = 3

    def write(self, capability: int, folder: Path) -> None:
        """Writes NAME.cubin, .ptx, and .shared, the bytes of shared memory."""
        import triton
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource

        names = self.kernel.arg_names
        constants = self.constants | {"PDL": capability >= 90}
        types = _TYPES | dict.fromkeys(constants, "constexpr")
        pointers = [i for i, name in enumerate(names) if types[name][0] == "*"]
        source = ASTSource(
            self.kernel,
            signature={name: types[name] for name in names},
            constexprs=constants,
            attrs={(i,): [["tt.divisibility", 16]] for i in pointers},
        )
        built = triton.compile(
            source,
            target=GPUTarget("cuda", capability, 32),
            options={"num_warps": self.warps, "num_stages": self.stages},
        )
        (folder / f"{self.name}.cubin").write_bytes(built.asm["cubin"])
        (folder / f"{self.name}.ptx").write_text(built.asm["ptx"])
        (folder / f"{self.name}.shared").write_text(str(built.metadata.shared))


def main(capability: int, folder: Path) -> None:
    """Compiles both GEMMs for each width of tiles, and the kernels around them."""
    import triton
    import triton.language as tl
    import vllm.triton_utils

    vllm.triton_utils.triton, vllm.triton_utils.tl = triton, tl
    from vllm.models.flint.ops.experts import align, grouped_kernel
    from vllm.models.flint.ops.experts.grouped_config import picked_configs

    found = [
        Built("permute", grouped_kernel.permute_rows, {"K": HIDDEN, "BLOCK": 2048}, 4),
        Built(
            "combine",
            grouped_kernel.combine_pairs,
            {"TOP_K": TOP_K, "SHARED": 1, "BLOCK": 1024},
            4,
        ),
    ]
    for config in picked_configs(divmod(capability, 10)):
        block_t = config.block_t
        constants = align.read_at_once(block_t) | {"BLOCK_T": block_t}
        warps = constants.pop("num_warps")
        found.append(Built(f"group-{block_t}", align._group_kernel, constants, warps))
        sizes = ("gate-up", WIDTH, HIDDEN), ("down", HIDDEN, WIDTH)
        gemms = zip(sizes, (config.gate_up, config.down))
        # Packed codes are for SM90.
        orders = (False, True) if capability == 90 else (False,)
        for ((name, n, k), gemm), ordered in itertools.product(gemms, orders):
            gated = name == "gate-up"
            constants = {
                "N": n,
                "K": k,
                "SHARE": TOP_K if gated else 1,
                "GATED": gated,
                "ORDERED": ordered,
                "PACKED": True,
                "BLOCK_N": gemm.block_n,
                "BLOCK_T": block_t,
                "BLOCK_K": gemm.block_k,
            }
            kernel = grouped_kernel.grouped_gemm
            name = f"{'ordered-' if ordered else ''}{name}-{block_t}"
            found.append(Built(name, kernel, constants, gemm.warps, gemm.stages))
    for kernel in found:
        kernel.write(capability, folder)


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
