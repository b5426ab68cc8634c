#!/bin/sh
# The kernel sets of AVX-512 (BF16, VNNI) and AVX-VNNI on any x86-64 machine, in an emulated Sapphire Rapids: make test-x86
#   on Debian: apt-get install busybox-static cpio isolinux xorriso
#   and Bochs, newer than 3.0 (Debian's 2.7 has no such processor), built where BOCHS says:
#   git clone https://github.com/bochs-emu/Bochs && cd Bochs/bochs && ./configure --enable-x86-64 --enable-avx --enable-evex --enable-amx \
#     --enable-handlers-chaining --enable-repeat-speedups --enable-fast-function-calls --enable-trace-linking --with-nogui --disable-docbook && make
# Linux (KERNEL names an image; else Debian's is fetched) boots from a CD that holds nothing but csrc/test/kernels_fuzz, and runs a random model for
# each of MODELS seeds (40) from SEED on (1); a start takes a minute, a model 1 to 30 seconds. SEEDS names single ones in their place.
# clearcpuid: 580 is FSRM, with which Linux 6.1 takes memmove for one that needs no path for few bytes, though Bochs has fast strings (ERMS)
# switched off: it then runs away. 600 is AMX, which Linux has only where XFD is, and Bochs has not: `sanitize` runs its tiles emulated.
set -eu
here=$(cd "$(dirname "$0")/.." && pwd)
out=$here/build/x86
: "${BOCHS:?error: BOCHS names the folder where Bochs was built (tests/x86.sh says how)}"
[ -x "$BOCHS/bochs" ] || { echo "error: there is no $BOCHS/bochs" >&2; exit 1; }
seeds=${SEEDS:-$(seq "${SEED:-1}" $((${SEED:-1} + ${MODELS:-40} - 1)))}
for tool in cpio xorriso busybox; do
  command -v $tool > /dev/null || { echo "error: $tool is missing: apt-get install busybox-static cpio isolinux xorriso" >&2; exit 1; }
done
mkdir -p "$out"

if [ -z "${KERNEL:-}" ]; then
  if [ ! -e "$out"/linux/boot ]; then
    echo "==> Linux"
    name=$(apt-cache depends linux-image-amd64 | awk '/Depends: linux-image/ { print $2; exit }')
    (cd "$out" && apt-get -qq download "$name" && dpkg -x "$name"_*.deb linux)
  fi
  KERNEL=$(echo "$out"/linux/boot/vmlinuz-*)
fi

echo "==> kernels"
cmake -S "$here" -B "$out/kernels" -DDIPTYCH_BUILD_MODULE=OFF -DDIPTYCH_BUILD_TESTS=ON -DCMAKE_EXE_LINKER_FLAGS=-static > "$out/cmake.log"
cmake --build "$out/kernels" -j2 --target kernels_fuzz

root=$out/root disc=$out/disc
rm -rf "$root" "$disc"
mkdir -p "$root/proc" "$root/dev" "$root/tmp" "$disc"
cp "$(command -v busybox)" "$root/busybox"
strip -o "$root/kernels_fuzz" "$out/kernels/kernels_fuzz"
cat > "$root/init" << END
#!/busybox sh
/busybox mount -t proc proc /proc
/busybox mount -t tmpfs tmp /tmp
echo "sets: \$(/busybox grep -m1 -o -w -E 'avx512_bf16|avx512_vnni|avx_vnni' /proc/cpuinfo | /busybox tr '\n' ' ')"
for seed in $(echo $seeds); do
  if ! /kernels_fuzz 0 \$seed > /tmp/said; then echo "failed: \$(/busybox cat /tmp/said)"; fi
  echo "seed \$seed, \$(/busybox cut -d. -f1 /proc/uptime) s"
done
echo "all ended"
/busybox sleep 1  # until the line has been sent
/busybox poweroff -f
END
chmod +x "$root/init"
(cd "$root" && find . | cpio -o -H newc --quiet | gzip -1) > "$disc/initrd"
cp "$KERNEL" "$disc/vmlinuz"
cp /usr/lib/ISOLINUX/isolinux.bin /usr/lib/syslinux/modules/bios/ldlinux.c32 "$disc"
cat > "$disc/isolinux.cfg" << END
DEFAULT linux
PROMPT 0
LABEL linux
  KERNEL /vmlinuz
  APPEND initrd=/initrd console=ttyS0 quiet loglevel=3 nokaslr mitigations=off lsm= random.trust_cpu=on clearcpuid=600,580
END
xorriso -as mkisofs -quiet -o "$out/disc.iso" -b isolinux.bin -c boot.cat -no-emul-boot -boot-load-size 4 -boot-info-table "$disc"

cat > "$out/bochsrc" << END
megs: 1024
cpu: model=sapphire_rapids, count=1, ips=100000000
romimage: file=$BOCHS/bios/BIOS-bochs-latest
vgaromimage: file=$BOCHS/bios/VGABIOS-lgpl/VGABIOS-lgpl-latest.bin
ata0-master: type=cdrom, path=$out/disc.iso, status=inserted
boot: cdrom
com1: enabled=1, mode=file, dev=$out/said.txt
display_library: nogui
clock: sync=none
log: $out/bochs.log
panic: action=fatal
error: action=report
info: action=ignore
END
echo "==> random models on an emulated processor (a minute until the first)"
: > "$out/said.txt"
"$BOCHS/bochs" -q -f "$out/bochsrc" > "$out/bochs.txt" 2>&1 &
emulator=$!
trap 'kill $emulator 2> /dev/null || true' EXIT
tail -n +1 -f --pid=$emulator "$out/said.txt" | sed -u 's,\r,,' | grep --line-buffered -E '^(sets|seed|failed|all ended)' || true
wait $emulator || true  # that the power goes off ends it as a failure
if grep -q '^failed' "$out/said.txt" || ! grep -q '^all ended' "$out/said.txt"; then
  echo "error: kernels fail on the emulated processor, or it stopped ($out/said.txt, $out/bochs.log)" >&2
  exit 1
fi
