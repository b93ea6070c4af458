# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""The steps of docker/Dockerfile, which run outside Docker as well.

- ``pairing``: what pin.toml says of each CUDA version.
- ``source``: the patched source tree, from a clone or from the archive.
- ``requirements``: the base's requirements, as a CUDA version wants them.
- ``wheel``: the wheel, compiled or repacked, and the check that it is ours.
- ``bake``: build arguments and labels for ``docker buildx bake``.
- ``cli``: the command line.

Only the standard library is used, except to download.
"""
