// Hints that fetch memory ahead of its use.
#pragma once

#include <cstddef>

namespace simcluster {

inline constexpr std::size_t kCacheLine = 64;

inline void prefetch_bytes(const void* from, std::size_t size) {
  const char* at = static_cast<const char*>(from);
  for (std::size_t i = 0; i < size; i += kCacheLine) __builtin_prefetch(at + i, 1);
}

}  // namespace simcluster
