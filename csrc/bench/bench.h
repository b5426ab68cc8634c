// What the microbenchmarks share: the clock, and lists in their options.
#pragma once
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <string>
#include <vector>

namespace diptych {

inline double now_s() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

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

}  // namespace diptych
