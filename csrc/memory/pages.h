// Pages of a mapped file that a thread is about to read: asked for at once, as huge ones where the file system keeps such (a fault
// for each few costs as much as a copy), and given back behind it (MappedPages: at its end). Only of such a file, since what is given
// back of other memory is lost.
#pragma once

#include <cstdint>

namespace diptych {

void ask_for_pages(const void* data, int64_t bytes);
void give_pages_back(const void* data, int64_t bytes);

class MappedPages {
 public:
  MappedPages(const void* data, int64_t bytes) : data_(data), bytes_(bytes) { ask_for_pages(data, bytes); }
  ~MappedPages() { give_pages_back(data_, bytes_); }
  MappedPages(const MappedPages&) = delete;
  MappedPages& operator=(const MappedPages&) = delete;

 private:
  const void* data_;
  int64_t bytes_;
};

}  // namespace diptych
