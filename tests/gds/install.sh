#!/bin/sh
# What the tests of the backend gds need on a machine without a GPU: kvikio in an environment of its own, which sees the
# other one's packages, and the library of NVIDIA's driver, unpacked from Debian's package. Needs no root.
#     install.sh ENVIRONMENT-OF-THE-OTHER-TESTS NEW-ENVIRONMENT
set -eu
tests=$1 new=$2
constraints=$(dirname "$0")/../../constraints.txt

missing() {
    echo "the backend gds is not tested: $1" >&2
    exit 3
}

[ "$(uname -sm)" = "Linux x86_64" ] || missing "kvikio and libcuda1 are for Linux on x86_64"
driver_is_there=false
if PATH=$PATH:/usr/sbin:/sbin ldconfig -p 2>/dev/null | grep -q libcuda.so.1; then
    driver_is_there=true
elif ! command -v apt-get >/dev/null || ! command -v dpkg >/dev/null; then
    missing "no libcuda.so.1, and no Debian to take it from"
fi
rm -rf "$new"
"$tests/bin/python" -m venv "$new"
site=$("$new/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
"$tests/bin/python" -c 'import sysconfig; print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"))' \
    > "$site/tests.pth"
# Only what is loaded: all that they ask for weighs three gigabytes.
"$new/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps --constraint "$constraints" \
    kvikio-cu12 libkvikio-cu12 rapids-logger nvidia-cufile-cu12 cuda-pathfinder || missing "no wheels of kvikio"

mkdir "$new/driver"
! $driver_is_there || exit 0
# The sources of this machine, with the component that the package is in, and nothing of the system changed.
work=$new/debian
mkdir -p "$work/lists/partial" "$work/archives/partial"
if [ -f /etc/apt/sources.list.d/debian.sources ]; then
    sources=$work/non-free.sources
    sed 's/^Components:.*/Components: non-free/' /etc/apt/sources.list.d/debian.sources > "$sources"
elif grep -qs '^deb ' /etc/apt/sources.list; then
    sources=$work/non-free.list
    sed -n 's/^\(deb \(\[[^]]*\] \)\{0,1\}[^ ]* [^ ]*\) .*/\1 non-free/p' /etc/apt/sources.list > "$sources"
else
    missing "the package sources of this machine are not Debian's"
fi
absolute=$(cd "$work" && pwd)
set -- -qq -o "Dir::Etc::sourcelist=$absolute/$(basename "$sources")" -o Dir::Etc::sourceparts=/dev/null \
    -o "Dir::State::Lists=$absolute/lists" -o "Dir::Cache=$absolute" -o APT::Sandbox::User= -o Debug::NoLocking=1
apt-get "$@" update && (cd "$work" && apt-get "$@" download libcuda1) || missing "Debian's libcuda1 cannot be had"
dpkg -x "$work"/libcuda1_*.deb "$work/root"
cp -L "$work"/root/usr/lib/x86_64-linux-gnu/nvidia/current/libcuda.so.1 "$new/driver/" || true
[ -e "$new/driver/libcuda.so.1" ] || missing "Debian's libcuda1 has no libcuda.so.1"
rm -rf "$work"
