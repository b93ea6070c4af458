# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""The numerics contract of Flint in plain PyTorch: what "right" means.

Everything is computed in float64. Where the contract rounds to BF16, so does
`Numerics.CONTRACT`; `Numerics.EXACT` rounds nowhere, and judges engines that
compute in float32. Kernel tests compare with this, never with another kernel.
"""
