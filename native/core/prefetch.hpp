// Hints to the processor and the compiler about addresses.
#pragma once

#include <cstddef>

namespace simcluster {

inline constexpr std::size_t kCacheLine = 64;

inline void prefetch_bytes(const void* from, std::size_t size) {
  const char* at = static_cast<const char*>(from);
  for (std::size_t i = 0; i < size; i += kCacheLine) __builtin_prefetch(at + i, 1);
}

// The same address, kept in a register: of a part of an object the compiler would else work it out at every use, and of
// a thread_local one in a shared library it would else call a function for it.
template <typename T>
T* in_register(T* address) {
  asm("" : "+r"(address));
  return address;
}

}  // namespace simcluster
