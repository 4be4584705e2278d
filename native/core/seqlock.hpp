// Records that one writer replaces as often as it likes and that any reader gets whole or not at all. Nobody waits.
//
// A ring of slots, each under a sequence number: odd while its record is being written, even when it is complete. All
// words are atomic. Data is stored with release and loaded with acquire, so a reader that meets a word of a newer
// record also meets the number that tells of it; no fence is needed, and a race detector understands every access.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace simcluster {

using SharedWord = std::atomic<std::uint64_t>;
static_assert(SharedWord::is_always_lock_free && sizeof(SharedWord) == sizeof(std::uint64_t));

// Where the words of a ring lie, which are zero before the first record.
struct SeqlockRing {
  static constexpr std::size_t kOverhead = 2;  // words of a slot before the record: sequence, length

  SharedWord* newest = nullptr;  // number of the newest complete record, counted from 1
  SharedWord* slots = nullptr;
  std::size_t num_slots = 0;
  std::size_t capacity = 0;  // words of the longest record

  static std::size_t words(std::size_t num_slots, std::size_t capacity) { return num_slots * (capacity + kOverhead); }
  SharedWord* slot(std::uint64_t number) const { return slots + (number % num_slots) * (capacity + kOverhead); }
};

// Writes the record with this number, which is one more than the last; it is cut to the capacity.
inline void write_record(const SeqlockRing& ring, std::uint64_t number, std::span<const std::uint64_t> record) {
  SharedWord* const slot = ring.slot(number);
  const std::size_t count = record.size() < ring.capacity ? record.size() : ring.capacity;
  slot[0].store(2 * number - 1, std::memory_order_relaxed);
  slot[1].store(count, std::memory_order_release);
  SharedWord* const words = slot + SeqlockRing::kOverhead;
#pragma GCC unroll 8  // here and below: compilers leave loops over atomic words as they are
  for (std::size_t i = 0; i < count; ++i) words[i].store(record[i], std::memory_order_release);
  slot[0].store(2 * number, std::memory_order_release);
  ring.newest->store(number, std::memory_order_release);
}

// Copies the newest record and returns its number; 0 if there is none, or if the writer was faster than every try.
inline std::uint64_t read_record(const SeqlockRing& ring, std::vector<std::uint64_t>& record, int tries = 16) {
  for (; tries > 0; --tries) {
    const std::uint64_t number = ring.newest->load(std::memory_order_acquire);
    if (number == 0) return 0;
    const SharedWord* const slot = ring.slot(number);
    if (slot[0].load(std::memory_order_acquire) != 2 * number) continue;
    const std::uint64_t count = slot[1].load(std::memory_order_acquire);
    if (count > ring.capacity) continue;
    record.resize(count);
    const SharedWord* const words = slot + SeqlockRing::kOverhead;
    std::uint64_t* const out = record.data();
#pragma GCC unroll 8
    for (std::size_t i = 0; i < count; ++i) out[i] = words[i].load(std::memory_order_acquire);
    if (slot[0].load(std::memory_order_relaxed) == 2 * number) return number;
  }
  return 0;
}

}  // namespace simcluster
