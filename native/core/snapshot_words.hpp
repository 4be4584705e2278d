// A snapshot as words of 64 bits, which shared memory holds.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "snapshot.hpp"

namespace simcluster {

// Instants of a snapshot [ps] as nanoseconds of CLOCK_MONOTONIC, of which 64 bits hold 292 years and picoseconds 106
// days. `speed`: how many seconds of the instance pass in one of the clock.
struct InstanceClock {
  std::int64_t origin_ns = 0;  // the clock at the instance's 0
  double speed = 1.0;
  std::int64_t per_ns = 1000;  // 1: the instants are nanoseconds already

  std::int64_t at(Picoseconds t) const;
};

// And back: picoseconds of a clock that starts at `epoch_ns` and runs `speed` times as fast.
struct ReaderClock {
  std::int64_t epoch_ns = 0;
  double speed = 1.0;
  std::int64_t per_ns = 1000;  // 1: as they are

  Picoseconds at(std::int64_t ns) const;   // never before the start
  Picoseconds key(std::int64_t ns) const;  // what only an order depends on, before the start too
};

// Of the words; a reader of another one stays away.
inline constexpr std::uint64_t kSnapshotFormat = (std::uint64_t{2} << 32) | Snapshot::kVersion;

// How a snapshot is written.
struct WordForm {
  std::size_t capacity = 0;     // residents; the others are left out and counted
  std::size_t most_phases = 0;  // sums by more of them are left out
  InstanceClock clock;
  std::int64_t at = 0;  // the first word: when it was taken, by the clock
  bool exact = false;      // with what no view reads: what reached the engine, and which tokens have a hash
};

// Words of a snapshot with so many residents at most, of an instance with this block size.
std::size_t most_words(std::size_t capacity, std::int64_t block_size);

// Throws std::invalid_argument for a snapshot with more than two batches in flight.
void put_snapshot(std::vector<std::uint64_t>& words, const Snapshot& snapshot, const WordForm& form);

// False if the words contradict each other, which those of put_snapshot never do; then the snapshot is of no use.
bool take_snapshot(std::span<const std::uint64_t> words, const ReaderClock& clock, Snapshot& snapshot);
// The same without its requests.
bool take_head(std::span<const std::uint64_t> words, const ReaderClock& clock, Snapshot& snapshot);

// Words that nobody has read yet.
struct PublishedSnapshot {
  std::shared_ptr<const std::vector<std::uint64_t>> words;  // null: none
  ReaderClock clock;
  Picoseconds taken_at = 0;  // nothing has ended since the boundary, as far as is known, up to here

  // As take_snapshot() and take_head().
  bool take(Snapshot& snapshot) const;
  bool take_head(Snapshot& snapshot) const;
};

}  // namespace simcluster
