#!/bin/sh
# Measure everything on a rented machine with a GPU in half an hour: docs/gpu.md. This finds Python, or
# installs it with what Triton compiles by (a C compiler, Python's headers); gpu_day.py does the rest.
#     scripts/gpu_day.sh; PYTHON=/path/to/python scripts/gpu_day.sh chooses the interpreter
set -eu
cd "$(dirname "$0")/.."

is_usable='
import pathlib, sys, sysconfig, ensurepip, venv
headers = pathlib.Path(sysconfig.get_path("include"), "Python.h")
sys.exit(not (sys.version_info >= (3, 11) and headers.is_file()))'

find_python() {
    command -v gcc > /dev/null || return 1
    for python in python3.12 python3.11 python3.13 python3; do
        if "$python" -c "$is_usable" 2> /dev/null; then
            echo "$python"
            return 0
        fi
    done
    return 1
}

python=${PYTHON:-$(find_python || true)}
if [ -z "$python" ]; then
    packages="gcc python3 python3-dev python3-venv"
    # Its python3 is 3.10, which is too old.
    if grep -qs 'VERSION_ID="22.04"' /etc/os-release; then
        packages="gcc python3.11 python3.11-dev python3.11-venv"
    fi
    if [ "$(id -u)" != 0 ]; then
        echo "gpu_day: no Python 3.11 with headers and a C compiler here; run: sudo apt-get install $packages" >&2
        exit 1
    fi
    apt-get update -qq
    # shellcheck disable=SC2086
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq $packages
    python=$(find_python) || { echo "gpu_day: apt-get has no Python 3.11; name one: PYTHON=..." >&2; exit 1; }
fi
exec "$python" scripts/gpu_day.py "$@"
