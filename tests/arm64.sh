#!/bin/sh
# The kernels and phase equality on ARM64, from a cross build under emulation: make test-arm64
#   on Debian, as root: apt-get install g++-aarch64-linux-gnu qemu-user debootstrap
# Python and its packages for ARM64 are laid down once under build/arm64 (1.3 GB); nothing of this machine's is touched.
# Processors without dot or matrix products are emulated too, so that each set is chosen once by what is found. Without SVE, which no
# set of ours uses: torch's products do, and are ten times slower emulated with it (0.008 GFLOP/s; a forward of the bundled model a quarter hour).
# What depends on instructions and on cutting the work comes first. DIPTYCH_EMULATED says to tests that arithmetic is dear (test_balance).
# It takes hours. What passed is kept under build/arm64 for as long as the sources stay as they are, so a run that was cut short goes on
# where it stopped, test by test: call it again. Arguments choose test files (tests/kernels: all); JOBS pieces run at one time (2).
# DIPTYCH_ARM64_SAMPLE=0.01 runs a hundredth of each test function's cases, at least one (tests/resume.py), in about forty minutes.
set -eu
here=$(cd "$(dirname "$0")/.." && pwd)
out=$here/build/arm64
root=$out/root
site=$out/site
bin=$here/.venv/bin
fuzz_seconds=${SECONDS_TO_RUN:-60}

for tool in aarch64-linux-gnu-g++ qemu-aarch64 debootstrap; do
  command -v $tool > /dev/null || { echo "error: $tool is missing: apt-get install g++-aarch64-linux-gnu qemu-user debootstrap" >&2; exit 1; }
done

mkdir -p "$out"
if [ ! -e "$root/.done" ]; then
  echo "==> Python for ARM64"
  debootstrap --arch=arm64 --foreign --variant=minbase \
    --include=python3.11-minimal,libpython3.11-stdlib,libpython3.11-dev,libstdc++6,libgomp1,zlib1g bookworm "$root" > "$out-root.log"
  for package in "$root"/var/cache/apt/archives/*.deb; do dpkg -x "$package" "$root"; done
  touch "$root/.done"
fi

if [ ! -e "$site/.done" ]; then
  echo "==> packages for ARM64"
  # The wheel of torch that has no CUDA in it is an older one there; the others are this machine's.
  "$bin/pip" freeze --exclude-editable | grep -ivE '^(torch|uvloop|jsonschema|mypy|ruff|playwright|schemathesis|nanobind)' > "$out/packages.txt"
  env -u PIP_CONSTRAINT "$bin/pip" install -q --no-deps --target "$site" --only-binary=:all: --python-version 3.11 \
    --platform manylinux_2_31_aarch64 --platform manylinux_2_28_aarch64 --platform manylinux_2_17_aarch64 \
    --platform manylinux2014_aarch64 torch==2.7.1 -r "$out/packages.txt"
  "$bin/pip" install -q --target "$out/tools" nanobind
  touch "$site/.done"
fi

echo "==> cross build"
cmake -S "$here" -B "$out/kernels" -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 \
  -DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++ -DCMAKE_CXX_FLAGS="-idirafter $root/usr/include" -DDIPTYCH_BUILD_TESTS=ON \
  -DPython_EXECUTABLE="$bin/python" -DPython_INCLUDE_DIR="$root/usr/include/python3.11" \
  -Dnanobind_DIR="$(PYTHONPATH=$out/tools "$bin/python" -m nanobind --cmake_dir)" > "$out/cmake.log"
cmake --build "$out/kernels" -j2 --target kernels_fuzz _cpu
rm -rf "$out/stage" && mkdir "$out/stage" && cp -r "$here/src/diptych" "$out/stage/"
cp "$out"/kernels/_cpu*.so "$out/stage/diptych/compute/ops/_cpu.so"

cpu=max,sve=off
export DIPTYCH_EMULATED=1 QEMU_LD_PREFIX="$root" PYTHONDONTWRITEBYTECODE=1 OMP_NUM_THREADS=1 CXX=aarch64-linux-gnu-g++
export PYTHONPATH="$out/stage:$site:$here/tests"
# qemu looks for every path below the root first, where /tmp is another one.
export TMPDIR="$out/tmp"
mkdir -p "$TMPDIR"
cd "$here"
sources=$(find csrc src CMakeLists.txt tests/kernels tests/*.py -type f ! -name '*.pyc' ! -name '*.so' -print0 | sort -z | xargs -0 sha256sum | sha256sum | cut -c1-16)
passed=$out/passed/$sources
mkdir -p "$passed"

# qemu-user 7.2 asserts (plugins/core.c:221) where a forked child of a process with threads starts its own.
forked=tests/kernels/test_gemm.py::test_the_pool_works_in_a_forked_child

# One piece; its output goes to a file, its outcome is one line.
piece() {
  name=$(basename "$1" .py | tr ',=' '--')
  log=$passed/$name.log
  begin=$(date +%s)
  case $1 in
  fuzz:*)
    if [ -e "$passed/$name.done" ]; then echo "$name: passed before"; return; fi
    if qemu-aarch64 -cpu "${1#fuzz:}" "$out/kernels/kernels_fuzz" "$fuzz_seconds" > "$log" 2>&1; then touch "$passed/$name.done"; else echo "$name" >> "$passed/failed"; fi ;;
  *)
    code=0
    PASSED_FILE=$passed/$name.txt qemu-aarch64 -cpu $cpu "$root/usr/bin/python3.11" -m pytest -c /dev/null --rootdir="$here" \
      -p no:cacheprovider -p resume -W ignore -q -m 'not slow' --deselect "$forked" "$1" > "$log" 2>&1 || code=$?
    # 5: nothing is left to run
    if [ $code != 0 ] && [ $code != 5 ]; then grep -E '^(FAILED|ERROR) ' "$log" >> "$passed/failed" || echo "$name" >> "$passed/failed"; fi ;;
  esac
  echo "$name: $(tail -n 1 "$log") [$(($(date +%s) - begin)) s, $log]"
}

echo "==> random models, then tests of the kernels and of phase equality (each line is a piece that ended)"
rm -f "$passed/failed"
first="fuzz:$cpu fuzz:cortex-a76 fuzz:cortex-a72"
for name in phase_equality attention_both_ways latent_attention ops gemm rank_equality; do first="$first tests/kernels/test_$name.py"; done
pieces=${*:-$first}
[ $# != 0 ] || for file in tests/kernels/test_*.py; do case " $first " in *" $file "*) ;; *) pieces="$pieces $file" ;; esac; done
lane() {  # every JOBS-th piece
  at=0
  for each in $pieces; do
    [ $((at % jobs)) = "$1" ] && piece "$each"
    at=$((at + 1))
  done
}
jobs=${JOBS:-2}
lanes=0
while [ $lanes -lt "$jobs" ]; do lane $lanes & lanes=$((lanes + 1)); done
wait
if [ -e "$passed/failed" ]; then
  echo "error: these do not pass on ARM64:" >&2
  sort -u "$passed/failed" >&2
  exit 1
fi
if [ -n "${DIPTYCH_ARM64_SAMPLE:-}" ]; then
  echo "a sample of ARM64 passed: $(cat "$passed"/*.txt | sort -u | wc -l) cases of $(cat "$passed"/*.txt | sed 's/\[.*//' | sort -u | wc -l) test functions"
else
  echo "all of ARM64 passed"
fi
