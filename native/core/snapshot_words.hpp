// A snapshot as words of 64 bits: what shared memory holds and, with a frame around it, what can be sent as bytes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
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
  bool with_intake = false;
};

// Words of a snapshot with so many residents at most, of an instance with this block size.
std::size_t most_words(std::size_t capacity, std::int64_t block_size);

// Throws std::invalid_argument for a snapshot with more than two batches in flight.
void put_snapshot(std::vector<std::uint64_t>& words, const Snapshot& snapshot, const WordForm& form);

// False if the words contradict each other, which those of put_snapshot never do; then the snapshot is of no use.
bool take_snapshot(std::span<const std::uint64_t> words, const ReaderClock& clock, Snapshot& snapshot);

// Every field that restoring or an estimate reads; equal on every machine. to_bytes() throws as put_snapshot does,
// from_bytes() std::invalid_argument for bytes that are damaged, of another layout or no snapshot at all.
std::string to_bytes(const Snapshot& snapshot);
Snapshot from_bytes(std::string_view bytes);

}  // namespace simcluster
