#!/bin/sh
# Wheels for a machine with a GPU that has torch and no network: what Fastensor and its tests need beside it.
#     wheels.sh PYTHON FOLDER VERSION-OF-PYTHON-THERE MAJOR-VERSION-OF-CUDA-THERE
set -eu
cd "$(dirname "$0")/.."
python=$1 folder=$2 version=$3 cuda=$4
rm -rf "$folder"
"$python" -m pip wheel --quiet --no-deps --wheel-dir "$folder" .
platforms=
for glibc in 39 35 34 31 28 27 24 17; do platforms="$platforms --platform manylinux_2_${glibc}_x86_64"; done
# shellcheck disable=SC2086  # several options
"$python" -m pip download --quiet --no-deps --only-binary=:all: --python-version "$version" --implementation cp \
    $platforms --platform manylinux2014_x86_64 --constraint constraints.txt --dest "$folder" \
    "kvikio-cu$cuda" "libkvikio-cu$cuda" rapids-logger cuda-pathfinder isal safetensors fsspec platformdirs tqdm \
    packaging typing-extensions pytest pluggy iniconfig pygments hypothesis sortedcontainers attrs
ls "$folder"
