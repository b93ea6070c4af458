#!/bin/sh
# Serves with the patched vLLM, once it is verified to be the one that is pinned.
#
#   entrypoint.sh MODEL [OPTIONS OF vllm serve ...]
#   entrypoint.sh --verify-only
#
# PORT is the port to serve at (8000); the health check asks there.
# Runs outside an image too, where `python` has vLLM: the patch set is looked for
# beside this file, as in an image, and above it, as in the repository.
set -eu

here=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd)
patchset=$here/scripts/patchset
[ -d "$patchset" ] || patchset=$here/../scripts/patchset

site=$(python -I -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
if ! report=$(python -I -B "$patchset" verify "$site" 2>&1); then
    printf '%s\n' "$report" >&2
    echo "entrypoint: this is not the vLLM that was built and tested; not serving" >&2
    exit 1
fi
printf '%s\n' "$report" | tail -n 1
if [ "${1:-}" = --verify-only ]; then
    exit 0
fi
case ${1:--} in
-*)
    echo "entrypoint: name the model first, for example RecursiveSI/flint" >&2
    exit 2
    ;;
esac
model=$1
shift
exec vllm serve "$model" --port "${PORT:-8000}" "$@"
