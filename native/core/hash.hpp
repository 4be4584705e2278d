// The one integer hash of the core: the finaliser of SplitMix64, a bijection that spreads every input bit.
#pragma once

#include <cstdint>

namespace simcluster {

inline std::uint64_t mix64(std::uint64_t x) {
  x += 0x9e3779b97f4a7c15ULL;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ULL;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebULL;
  return x ^ (x >> 31);
}

}  // namespace simcluster
