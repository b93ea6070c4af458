# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""What an image is built from, by CUDA version: the [image] table of pin.toml."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path

from patchset.errors import PatchsetError
from patchset.pin import PIN_NAME


@dataclass(frozen=True)
class Pairing:
    """A CUDA version and the torch that goes with it.

    Attributes:
        name: for example "cu128".
        cuda: the full version, as tags of CUDA base images have it.
        torch: torch's version without a local part.
        torch_local: the local part that torch has for this CUDA version on
            PyTorch's own wheel index; empty if the ordinary index serves it.
        versions: project -> version where the base's requirements change.
        extras: project -> extra that replaces the one in the base's requirements.
        wheel: first part of the name of the wheel to repack; empty if none fits.
    """

    name: str
    cuda: str
    torch: str
    torch_local: str
    versions: dict[str, str]
    extras: dict[str, str]
    wheel: str

    @property
    def torch_version(self) -> str:
        """torch's whole version, for example ``2.11.0+cu128``."""
        return f"{self.torch}+{self.torch_local}" if self.torch_local else self.torch


@dataclass(frozen=True)
class ImagePin:
    """The [image] table; see the comments in pin.toml."""

    default: str
    repository: str
    ubuntu: str
    python: str
    platform: str
    arch_list: str
    pairings: dict[str, Pairing]

    def for_cuda(self, version: str) -> Pairing:
        """The pairing with this full CUDA version.

        Raises:
            PatchsetError: there is none.
        """
        for pairing in self.pairings.values():
            if pairing.cuda == version:
                return pairing
        known = ", ".join(pairing.cuda for pairing in self.pairings.values())
        raise PatchsetError(f"no CUDA {version} in {PIN_NAME}; there are: {known}")


def load_image_pin(root: Path) -> ImagePin:
    """Read the [image] table of pin.toml.

    Raises:
        PatchsetError: it cannot be read or lacks a field.
    """
    path = root / PIN_NAME
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
        image = dict(raw["image"])
        pairings = {
            name: Pairing(
                name=name,
                cuda=table["cuda"],
                torch=raw["torch"][name],
                torch_local=table.get("torch_local", ""),
                versions=dict(table.get("versions", {})),
                extras=dict(table.get("extras", {})),
                wheel=table.get("wheel", ""),
            )
            for name, table in image.pop("pairings").items()
        }
        return ImagePin(**image, pairings=pairings)
    except OSError as exc:
        raise PatchsetError(f"cannot read the pin file {path}: {exc}") from None
    except KeyError as exc:
        raise PatchsetError(f"{path} lacks the field {exc}") from None
    except (TypeError, ValueError) as exc:
        raise PatchsetError(f"the [image] table of {path} is wrong: {exc}") from None
