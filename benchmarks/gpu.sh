#!/bin/sh
# All that is worth doing on a GPU (gpu.py), whose table comes last. From the checkout, with what is installed (torch and
# NumPy at least) and a folder of wheels for the rest, which `make wheels` fills on another machine. Takes GPU_SECONDS
# (420) at most, what is installed included. If OUT is a folder, the results and a log go there. More arguments are gpu.py's.
#     gpu.sh PYTHON FOLDER-OF-WHEELS [ARGUMENTS]
set -eu
end=$(($(date +%s) + ${GPU_SECONDS:-420}))
cd "$(dirname "$0")/.."
python=$1 wheels=$2
shift 2
if [ -d "${OUT-}" ]; then output=$OUT log=$OUT/gpu.log; else output=benchmarks/results log=/dev/null; fi
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
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
    # Ten seconds: for a part that is killed, and for the table.
    failed=0
    "$python" benchmarks/gpu.py --seconds $((end - $(date +%s) - 10)) --output "$output/gpu" "$@" || failed=$?
    echo "$failed" > "$work/failed"
}

echo 1 > "$work/failed" # until all of it was done
everything "$@" 2>&1 | (trap '' INT TERM && exec tee "$log") # which ends with what it shows
exit "$(cat "$work/failed")"
