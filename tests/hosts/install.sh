#!/bin/sh
# What tests/hosts needs to make machines in network namespaces. Installs Debian's packages if they are missing and this
# may be done; without them the tests are skipped, and say so.
set -eu
PATH=$PATH:/usr/sbin:/sbin
for program in ip unshare nsenter; do
    command -v $program >/dev/null && continue
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        apt-get update -qq && apt-get install -y -qq iproute2 util-linux
    else
        echo "$program is not installed, so tests/hosts is skipped: apt-get install iproute2 util-linux" >&2
    fi
    break
done
