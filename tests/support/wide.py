# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""A model of four layers with every width of Flint, but for the count of experts.

Only machines with a GPU run it: each of its checkpoints takes a minute to write.
"""

from dataclasses import replace

from enginebench.models import FLINT
from tinymodel.specs import FULL, SLIDING

WIDE = replace(
    FLINT,
    name="wide",
    layer_types=(FULL, SLIDING, SLIDING, FULL),
    mlp_only_layers=(0, 1),
    num_experts=16,
    max_position_embeddings=4096,
    sink_range=(3.0, 9.0),
)
