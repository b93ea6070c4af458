# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""Build arguments and labels for ``docker buildx bake``, from pin.toml."""

from __future__ import annotations

from typing import Any

from imagebuild.pairing import ImagePin, Pairing
from patchset.errors import PatchsetError
from patchset.repo import Repo

TARGET_PREFIX = "pin-"


def labels(repo: Repo, image: ImagePin, pairing: Pairing) -> dict[str, str]:
    """The labels of an image: what it holds, by the ids that pin.toml has."""
    pin = repo.pin
    return {
        "org.opencontainers.image.title": "vLLM with the Flint patch set",
        "org.opencontainers.image.version": pin.release,
        "org.opencontainers.image.licenses": "Apache-2.0",
        "org.opencontainers.image.base.name": (
            f"nvidia/cuda:{pairing.cuda}-base-ubuntu{image.ubuntu}"
        ),
        "flint.base.version": pin.base.version,
        "flint.base.commit": pin.base.commit,
        "flint.series.sha256": repo.series_sha256,
        "flint.tree.source": pin.identity.source,
        "flint.tree.package": pin.identity.package,
        "flint.torch": pairing.torch_version,
    }


def arguments(image: ImagePin, pairing: Pairing) -> dict[str, str]:
    """The build arguments of a CUDA version."""
    return {
        "CUDA_VERSION": pairing.cuda,
        "UBUNTU_VERSION": image.ubuntu,
        "ARCH_LIST": image.arch_list,
    }


def bake_file(repo: Repo, image: ImagePin) -> dict[str, Any]:
    """A bake file in JSON: one target for each CUDA version, to inherit from.

    Raises:
        PatchsetError: the series is not the one that pin.toml has the ids of.
    """
    if repo.series_sha256 != repo.pin.series_sha256:
        raise PatchsetError(
            "patches/ or vllm_overlay/ changed since pin.toml was written; run "
            "`python3 scripts/patchset refresh`"
        )
    return {
        "target": {
            TARGET_PREFIX + name: {
                "args": arguments(image, pairing),
                "labels": labels(repo, image, pairing),
            }
            for name, pairing in image.pairings.items()
        }
    }
