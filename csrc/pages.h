// Pages of a mapped file that a thread is about to read: asked for at once, given back at the end. Only of such a file, since what
// is given back of other memory is lost.
#pragma once

#include <cstdint>

namespace diptych {

class MappedPages {
 public:
  MappedPages(const void* data, int64_t bytes);
  ~MappedPages();
  MappedPages(const MappedPages&) = delete;
  MappedPages& operator=(const MappedPages&) = delete;

 private:
  void* begin_;
  int64_t bytes_;
};

}  // namespace diptych
