#!/bin/sh
# What tests/filesystems and benchmarks/unchanged.py need to make filesystems that share blocks. Installs Debian's
# packages if they are missing and this may be done; without them the tests are skipped, and say so.
set -eu
PATH=$PATH:/usr/sbin:/sbin
for program in mkfs.xfs xfs_quota mkfs.btrfs; do
    command -v $program >/dev/null && continue
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        apt-get update -qq && apt-get install -y -qq xfsprogs btrfs-progs
    else
        echo "$program is not installed, so tests/filesystems is skipped: apt-get install xfsprogs btrfs-progs" >&2
    fi
    break
done
