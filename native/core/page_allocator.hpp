// Memory of arrays that grow with the number of live requests. A large one has pages of its own: what it has not
// reached yet takes no memory, and what it leaves when it grows goes back to the system, where the heap would keep it.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <memory>
#include <new>
#include <vector>

namespace simcluster {

template <typename T>
struct PageAllocator {
  using value_type = T;
  static constexpr std::size_t kLarge = std::size_t{1} << 16;  // [bytes]; below that the heap wastes less than pages do

  PageAllocator() = default;
  template <typename U>
  PageAllocator(const PageAllocator<U>&) {}  // NOLINT: allocators convert into each other

  T* allocate(std::size_t count) {
    if (count < kLarge / sizeof(T)) return std::allocator<T>().allocate(count);
    void* const pages = count > kMost ? MAP_FAILED
                                      : mmap(nullptr, count * sizeof(T), PROT_READ | PROT_WRITE,
                                             MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (pages == MAP_FAILED) throw std::bad_alloc();
    return static_cast<T*>(pages);
  }
  void deallocate(T* array, std::size_t count) {
    if (count < kLarge / sizeof(T)) return std::allocator<T>().deallocate(array, count);
    munmap(array, count * sizeof(T));
  }
  template <typename U>
  bool operator==(const PageAllocator<U>&) const {
    return true;
  }

 private:
  static constexpr std::size_t kMost = static_cast<std::size_t>(-1) / 2 / sizeof(T);
};

template <typename T>
using GrowingVector = std::vector<T, PageAllocator<T>>;

}  // namespace simcluster
