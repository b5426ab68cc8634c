// PageBuffer: memory for weights, KV and activations.
#include <sys/mman.h>
#include <unistd.h>
#if defined(__linux__)
#include <sys/syscall.h>
#endif

#if defined(__SANITIZE_ADDRESS__)
#define DIPTYCH_ASAN 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define DIPTYCH_ASAN 1
#endif
#endif
#if DIPTYCH_ASAN
#include <sanitizer/asan_interface.h>
#endif

#include <new>
#include <utility>

#include "gemm/gemm_kernels.h"
#include "memory/pages.h"

namespace diptych {
namespace {

constexpr int64_t kHugePage = 2 << 20;

// The sanitizer knows nothing of mapped pages until it is told.
void forbid_memory(const void* begin, int64_t bytes) {
#if DIPTYCH_ASAN
  ASAN_POISON_MEMORY_REGION(begin, static_cast<size_t>(bytes));
#else
  (void)begin, (void)bytes;
#endif
}

void allow_memory(const void* begin, int64_t bytes) {
#if DIPTYCH_ASAN
  ASAN_UNPOISON_MEMORY_REGION(begin, static_cast<size_t>(bytes));
#else
  (void)begin, (void)bytes;
#endif
}

void advise(const void* data, int64_t bytes, int advice) {
  const uintptr_t page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE)), address = reinterpret_cast<uintptr_t>(data);
  madvise(reinterpret_cast<void*>(address / page * page), static_cast<size_t>(address % page) + bytes, advice);
}

}  // namespace

// Mapped with room to align to a huge page; a walk over weights then misses the TLB once per 2 MiB instead of per 4 KiB.
PageBuffer::PageBuffer(int64_t bytes) : bytes_(bytes) {
  if (bytes <= 0) return;
  mapped_bytes_ = round_up(bytes, kHugePage) + kHugePage;
  mapping_ = mmap(nullptr, mapped_bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapping_ == MAP_FAILED) {
    mapping_ = nullptr;
    throw std::bad_alloc();
  }
  const uintptr_t address = reinterpret_cast<uintptr_t>(mapping_);
  data_ = reinterpret_cast<uint8_t*>((address + kHugePage - 1) / kHugePage * kHugePage);
#if defined(MADV_HUGEPAGE)
  madvise(data_, round_up(bytes, kHugePage), MADV_HUGEPAGE);
#endif
  forbid_memory(data_ + bytes, static_cast<uint8_t*>(mapping_) + mapped_bytes_ - (data_ + bytes));
}

PageBuffer::~PageBuffer() {
  if (mapping_ == nullptr) return;
  allow_memory(mapping_, mapped_bytes_);  // the next mapping may come to lie here
  munmap(mapping_, mapped_bytes_);
}

void PageBuffer::forbid(int64_t begin, int64_t end) const { forbid_memory(data_ + begin, end - begin); }

void PageBuffer::back(int64_t begin, int64_t end) const {
#if defined(__linux__)
  constexpr int kPopulateWrite = 23;  // MADV_POPULATE_WRITE, which older headers lack
  if (end > bytes_) end = bytes_;
  if (begin < end) madvise(data_ + begin, end - begin, kPopulateWrite);
#else
  (void)begin, (void)end;
#endif
}

bool PageBuffer::interleave(const std::vector<int>& nodes) const {
#if defined(__linux__)
  constexpr int kInterleave = 3, kBitsOfMask = 1024;  // MPOL_INTERLEAVE; as many nodes as the system can be built for
  unsigned long mask[kBitsOfMask / (8 * sizeof(unsigned long))] = {};
  constexpr int kBits = 8 * sizeof(unsigned long);
  for (int node : nodes)
    if (node >= 0 && node < kBitsOfMask) mask[node / kBits] |= 1ul << (node % kBits);
  return data_ != nullptr && syscall(SYS_mbind, data_, round_up(bytes_, kHugePage), kInterleave, mask, kBitsOfMask, 0) == 0;
#else
  (void)nodes;
  return false;
#endif
}

void ask_for_pages(const void* data, int64_t bytes) {
#if defined(__linux__)
  constexpr int kPopulateRead = 22;  // MADV_POPULATE_READ, which older headers lack
  advise(data, bytes, kPopulateRead);
#else
  (void)data, (void)bytes;
#endif
}

void give_pages_back(const void* data, int64_t bytes) { advise(data, bytes, MADV_DONTNEED); }

PageBuffer::PageBuffer(PageBuffer&& other) noexcept { *this = std::move(other); }

PageBuffer& PageBuffer::operator=(PageBuffer&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  std::swap(mapping_, other.mapping_);
  std::swap(mapped_bytes_, other.mapped_bytes_);
  return *this;
}

}  // namespace diptych
