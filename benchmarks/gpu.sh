#!/bin/sh
# Everything that needs a GPU: the tests, the doctor, the benchmark of offloading, then that of checkpoints, whose table
# comes last. From the checkout, with what is installed (torch and NumPy at least) and a folder of wheels for the rest,
# which `make wheels` fills on another machine. Takes GPU_SECONDS (540), and at most 40 more. If OUT is a folder, the results and a log go there.
#     gpu.sh PYTHON FOLDER-OF-WHEELS
set -eu
cd "$(dirname "$0")/.."
python=$1 wheels=$2
end=$(($(date +%s) + ${GPU_SECONDS:-540}))
if [ -d "${OUT-}" ]; then output=$OUT log=$OUT/gpu.log; else output=benchmarks/results log=/dev/null; fi
mkdir -p .bench
work=$(mktemp -d)
trap 'rm -rf "$work" .bench/pytest' EXIT
trap 'exit 143' INT TERM
export PYTHONPATH="$PWD/core:$PWD:$work/site${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 PYTEST_DISABLE_PLUGIN_AUTOLOAD=1

install() {
    "$python" -m pip install --quiet --no-index --find-links "$wheels" --no-deps --no-compile --upgrade \
        --target "$work/site" "$@"
}

install_wheels() {
    names=$(cd "$wheels" && ls ./*.whl | sed 's|^\./||; s|-.*||' | sort -u)
    # shellcheck disable=SC2086  # several names
    install $names && return
    for name in $names; do install "$name" || echo "no wheel of $name fits: it has to be installed already"; done
}

everything() {
    if ls "$wheels"/*.whl > /dev/null 2>&1; then install_wheels; fi
    "$python" -c 'import fsspec, hypothesis, isal, numpy, platformdirs, pytest, rich, safetensors, torch, typer'
    for folder in "$work"/site/nvidia/*/lib; do export LD_LIBRARY_PATH="$folder${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"; done
    failed=0
    # The files of the tests are on the disk that is measured.
    timeout --foreground --kill-after 10 200 "$python" -m pytest tests/gpu -m gpu -rs -p no:cacheprovider \
        --basetemp="$PWD/.bench/pytest" -o tmp_path_retention_policy=none || failed=$?
    timeout --foreground --kill-after 10 60 "$python" -m fastensor doctor --quick || failed=$?
    timeout --foreground --kill-after 10 150 "$python" benchmarks/offload.py --device cuda --parts steps --rounds 1 \
        --models "transformer encoder" ResNet-18 --directory .bench --output "$output/offload-gpu" || failed=$?
    rest=$((end - $(date +%s)))
    rest=$((rest > 0 ? rest : 0))
    timeout --foreground --kill-after 20 $((rest + 20)) "$python" benchmarks/gpu.py --seconds "$rest" \
        --output "$output/gpu" || failed=$?
    echo "$failed" > "$work/failed"
}

echo 1 > "$work/failed" # until all of it was done
everything 2>&1 | (trap '' INT TERM && exec tee "$log") # which ends with what it shows
exit "$(cat "$work/failed")"
