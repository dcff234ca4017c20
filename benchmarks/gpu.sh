#!/bin/sh
# Everything that needs a GPU: the tests, then the benchmark, whose table comes last. From the checkout, with what is
# installed (torch and NumPy at least) and a folder of wheels for the rest, which `make wheels` fills on another machine.
#     gpu.sh PYTHON FOLDER-OF-WHEELS
set -eu
cd "$(dirname "$0")/.."
python=$1 wheels=$2
site=$(mktemp -d)
trap 'rm -rf "$site"' EXIT
if ls "$wheels"/*.whl > /dev/null 2>&1; then
    "$python" -m pip install --quiet --no-index --no-deps --no-compile --upgrade --target "$site" "$wheels"/*.whl
fi
export PYTHONPATH="$PWD/core:$PWD:$site${PYTHONPATH:+:$PYTHONPATH}"
failed=0
"$python" -m pytest tests/gpu -m gpu -rs -p no:cacheprovider || failed=$?
"$python" -m fastensor doctor --quick || failed=$?
"$python" benchmarks/gpu.py || failed=$?
exit "$failed"
