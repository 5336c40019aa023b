#!/usr/bin/env bash
# Builds the native test programs with AddressSanitizer + UndefinedBehaviorSanitizer and with ThreadSanitizer, runs
# them, and compares the kernels, not sanitised, of every instruction set that this processor has. run.sh BUILD_FOLDER
set -euo pipefail

root=$(cd "$(dirname "$0")/../../.." && pwd)
build=$1
mkdir -p "$build"

# ThreadSanitizer's memory map does not bear the address randomisation of recent kernels.
fixed_addresses=()
if setarch "$(uname -m)" -R true 2>/dev/null; then fixed_addresses=(setarch "$(uname -m)" -R); fi

try() { # the programs of a folder, all of them
    (cd "$1" && "${fixed_addresses[@]}" ctest --output-on-failure --timeout 120) >"$1.tests.log" 2>&1
}

# Programs run while the next are built.
running=()
for sanitizers in address,undefined thread; do
    folder=$build/${sanitizers%%,*}
    cmake -S "$root" -B "$folder" -G Ninja -DSSDPLAN_NATIVE_TESTS=ON -DSSDPLAN_SANITIZE=$sanitizers >"$folder.log" 2>&1 ||
        { cat "$folder.log"; exit 1; }
    cmake --build "$folder" --target sanitized_tests >"$folder.log" 2>&1 || { cat "$folder.log"; exit 1; }
    try "$folder" &
    running+=("$! $sanitizers")
done
cmake --build "$build/address" --target kernels_hashes >"$build/hashes.log" 2>&1 || { cat "$build/hashes.log"; exit 1; }
for each in "${running[@]}"; do
    sanitizers=${each#* }
    folder=$build/${sanitizers%%,*}
    echo "native tests, -fsanitize=$sanitizers"
    wait "${each%% *}" || { cat "$folder.tests.log"; exit 1; }
    grep -E 'tests passed' "$folder.tests.log"
done

shopt -s nullglob
programs=("$build"/address/tests/native/cpp/kernels_hash_*)
hashes=
for program in "${programs[@]}"; do
    hash=$("$program") || { echo "$program failed" >&2; exit 1; }
    echo "$hash"
    hashes+=$hash$'\n'
done
if [ "$(grep -v skipped <<<"$hashes" | awk 'NF {print $2}' | sort -u | wc -l)" -gt 1 ]; then
    echo "the instruction sets do not give the same bits" >&2
    exit 1
fi
