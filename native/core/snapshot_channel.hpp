// Snapshots in shared memory: an instance's state as plain words, with its options as attributes of the segment.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "config.hpp"
#include "engine.hpp"
#include "shm_channel.hpp"
#include "snapshot.hpp"
#include "snapshot_words.hpp"
#include "view.hpp"

namespace simcluster {

class SnapshotWriter {
 public:
  // Room for so many resident requests. Throws as ShmWriter does, and std::invalid_argument for less than one.
  SnapshotWriter(const std::string& name, std::size_t capacity, const SchedulerConfig& config,
                 std::size_t num_slots = 4);

  // What has no room is left out and counted: first of the waiting, from the last on, then of the running.
  void publish(const Snapshot& snapshot, const InstanceClock& clock, std::int64_t now_ns);
  // The state of a simulated instance.
  void publish(const Engine& engine, const InstanceClock& clock, std::int64_t now_ns);
  void close() { channel_.close(); }
  bool is_closed() const { return channel_.is_closed(); }
  std::size_t capacity() const { return capacity_; }
  std::uint64_t num_published() const { return channel_.num_written(); }

 private:
  std::size_t capacity_, num_phases_;
  ShmWriter channel_;
};

class SnapshotReader {
 public:
  // Instants are told as picoseconds of a clock that is 0 at `epoch_ns` of CLOCK_MONOTONIC and runs `speed` times as
  // fast, earlier ones as 0. Throws std::invalid_argument for a bad name, or a speed that is not above 0.
  explicit SnapshotReader(const std::string& name, std::int64_t epoch_ns = 0, double speed = 1.0);

  // Looks for news; true if the snapshot is another one than before. Never waits, whatever the writer does. `asks` as
  // in ShmReader::poll.
  bool poll(std::int64_t now_ns, bool asks = true);
  // The last good one, null if there is none, as it holds at the last poll: `taken_at` is that instant if the writer
  // lives, since then nothing has happened after the newest record; requests are told apart by ids.
  const std::shared_ptr<const Snapshot>& snapshot();

  // Looks for news, and shows a view the newest snapshot unless it would learn nothing from it. The view reads the
  // requests when it is asked about them.
  void refresh(InstanceView& view, std::int64_t now_ns, bool asks = true);

  SourceState state() const { return channel_.state(); }
  bool has_snapshot() const { return decoded_ ? snapshot_ != nullptr : !channel_.record().empty(); }
  std::int64_t age_ns() const { return polled_ns_ - published_ns_; }  // of the snapshot at the last poll
  std::uint64_t num_changes() const { return num_changes_; }  // a number per snapshot, over all writers
  std::int64_t epoch_ns() const { return clock_.epoch_ns; }
  double speed() const { return clock_.speed; }
  Picoseconds now() const { return clock_.at(polled_ns_); }
  const ShmReader& channel() const { return channel_; }
  // The options of the instance whose snapshot this is; std::runtime_error before one was met.
  SchedulerConfig config() const;

 private:
  Picoseconds known_until() const;

  ShmReader channel_;
  ReaderClock clock_;
  std::int64_t polled_ns_ = 0, published_ns_ = 0;
  std::uint64_t num_changes_ = 0;
  bool decoded_ = false;
  std::shared_ptr<const Snapshot> snapshot_;
  std::shared_ptr<Snapshot> spare_;  // the one before, whose memory may be used again
};

}  // namespace simcluster
