// What the microbenchmarks share: the clock, and lists in their options.
#pragma once
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <string>
#include <vector>

namespace diptych {

// Of the clock on the wall, or of the processor time of one of `cpu_threads` threads: that says what code costs on a machine whose
// cores others use too.
inline int cpu_threads = 0;
inline double now_s() {
  if (cpu_threads == 0) return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
  timespec now{};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
  return (static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec)) / cpu_threads;
}

// "a,b,c" in parts
inline std::vector<std::string> split(const std::string& text) {
  std::vector<std::string> parts;
  for (size_t at = 0; at <= text.size();) {
    const size_t comma = std::min(text.find(',', at), text.size());
    parts.push_back(text.substr(at, comma - at));
    at = comma + 1;
  }
  return parts;
}

inline std::vector<int64_t> whole_numbers(const std::string& text) {
  std::vector<int64_t> numbers;
  for (const std::string& part : split(text)) numbers.push_back(std::atoll(part.c_str()));
  return numbers;
}

[[noreturn]] inline void refuse(const std::string& option) {
  std::fprintf(stderr, "no such option, or without its value: %s; the file's first lines have them all\n", option.c_str());
  std::exit(2);
}

inline std::string value_of(int argc, char** argv, int option) {
  if (option + 1 == argc) refuse(argv[option]);
  return argv[option + 1];
}

}  // namespace diptych
