#!/bin/sh
# Wheels for a machine with a GPU that has torch and no network: what Fastensor and its tests need beside it.
#     wheels.sh PYTHON FOLDER VERSIONS-OF-PYTHON-THERE... MAJOR-VERSION-OF-CUDA-THERE
set -eu
cd "$(dirname "$0")/.."
python=$1 folder=$2
shift 2
versions=
while [ $# -gt 1 ]; do
    versions="$versions $1"
    shift
done
cuda=$1
case $cuda in
    12) cufile=nvidia-cufile-cu12 ;;
    *) cufile="nvidia-cufile==1.15.*" ;; # of CUDA 13.0: later drivers take it as well
esac
platforms=
for glibc in 39 35 34 31 28 27 24 17; do platforms="$platforms --platform manylinux_2_${glibc}_x86_64"; done
rm -rf "$folder"
"$python" -m pip wheel --quiet --no-deps --wheel-dir "$folder" .
download() {
    # shellcheck disable=SC2086  # several options
    "$python" -m pip download --quiet --only-binary=:all: --python-version "$version" --implementation cp \
        $platforms --platform manylinux2014_x86_64 --constraint constraints.txt --dest "$folder" "$@"
}
for version in ${versions:?}; do
    # Without what they ask for: CUDA, NumPy and torch are there.
    download --no-deps "kvikio-cu$cuda" "libkvikio-cu$cuda" "$cufile" rapids-logger cuda-pathfinder isal safetensors
    download fsspec platformdirs typer rich pytest hypothesis
    # For the programs of benchmarks/gpu_use.py.
    download --no-deps lightning torchmetrics accelerate transformers
    download lightning-utilities huggingface-hub tokenizers regex psutil
done
ls "$folder"
