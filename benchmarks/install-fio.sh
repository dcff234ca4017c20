#!/bin/sh
# fio shows the limit of the disk. Installs Debian's package if it is missing and this may be done.
set -eu
command -v fio >/dev/null && exit 0
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    apt-get update -qq && apt-get install -y -qq fio
else
    echo "fio is not installed, so the table will lack the limit of the disk: apt-get install fio" >&2
fi
