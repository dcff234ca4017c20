"""The tests for while one writes: what decides, files byte for byte, round trips, gradients. Printed, they are the
arguments of pytest."""

from __future__ import annotations

QUICK = (
    "tests/stitch",
    "tests/files",
    "tests/backends",
    "tests/benchmarks",
    "tests/testing",
    "tests/select/test_select.py",
    "tests/select/test_dictionary_files.py",
    "tests/select/test_machine.py",
    "tests/select/test_paper_csv.py",
    "tests/project/test_contributing.py",
    "tests/project/test_package.py",
    "tests/project/test_public_arguments.py",
    "tests/project/test_versions.py",
    "tests/checkpoint/test_containers.py",
    "tests/checkpoint/test_round_trip.py",
    "tests/checkpoint/writing/test_freeing.py",
    "tests/checkpoint/asynchronous/test_async_parts.py",
    "tests/offload/test_offload_parts.py",
    "tests/offload/test_scheduler.py",
    "tests/offload/test_encoding.py",
    "tests/offload/test_gradients.py",
)

if __name__ == "__main__":
    print(*QUICK)
