// Records all of whose words follow from their number, so that any mixture of two is noticed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace simcluster::testing {

inline std::uint64_t word_of(std::uint64_t number, std::uint64_t place) {
  std::uint64_t x = number * 0x9e3779b97f4a7c15U + place + 1;
  x = (x ^ (x >> 31)) * 0xbf58476d1ce4e5b9U;
  return x ^ (x >> 29);
}

inline std::vector<std::uint64_t> words_of_record(std::uint64_t number, std::size_t capacity) {
  std::vector<std::uint64_t> words(1 + number % capacity);
  for (std::size_t i = 0; i < words.size(); ++i) words[i] = word_of(number, i);
  return words;
}

}  // namespace simcluster::testing
