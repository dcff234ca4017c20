#!/bin/sh
# transformers 4 in an environment of its own, which sees the other one's packages.
#     install.sh ENVIRONMENT-OF-THE-OTHER-TESTS NEW-ENVIRONMENT
set -eu
tests=$1 new=$2
rm -rf "$new"
"$tests/bin/python" -m venv "$new"
site=$("$new/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
"$tests/bin/python" -c 'import sysconfig; print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"))' \
    > "$site/tests.pth"
"$new/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps \
    transformers==4.57.6 huggingface_hub==0.36.2 tokenizers==0.22.2
