// One writer's records in POSIX shared memory, for readers in other processes. Linux.
//
// A segment is created whole by its writer and never changes its shape; a writer that comes after it makes a new one
// under the same name. The writer holds a lock on it that the kernel takes back when the process dies, however it dies,
// so readers learn of that without a heartbeat, and in other pid namespaces too.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "seqlock.hpp"

namespace simcluster {

// What is known of the writer.
enum class SourceState : std::uint8_t {
  missing,  // there was none yet
  live,     // it holds the segment: no newer record means that nothing new happened
  closed,   // it ended in good order
  dead,     // it is gone without a word
};

// Fixed facts of a segment, beside its name.
struct ChannelShape {
  std::uint64_t version = 0;  // of the meaning of attributes and records; readers of another one stay away
  std::size_t num_slots = 4;
  std::size_t capacity = 0;   // words of the longest record
  std::vector<std::uint64_t> attributes;  // at most kMaxAttributes words that hold for all records
};

inline constexpr std::size_t kMaxAttributes = 48;

// Nanoseconds of CLOCK_MONOTONIC, one clock for all processes of a machine.
std::int64_t monotonic_ns();

// A mapped segment.
class ShmSegment {
 public:
  ShmSegment() = default;
  ShmSegment(ShmSegment&& other) noexcept { swap(other); }
  ShmSegment& operator=(ShmSegment&& other) noexcept {
    swap(other);
    return *this;
  }
  ~ShmSegment();

  void swap(ShmSegment& other) noexcept;
  SharedWord* words() const { return words_; }
  int file() const { return file_; }

 private:
  friend class ShmWriter;
  friend class ShmReader;

  int file_ = -1;
  SharedWord* words_ = nullptr;
  std::size_t bytes_ = 0;
};

class ShmWriter {
 public:
  // Throws std::invalid_argument for a bad name or shape, std::runtime_error if another process writes under this name
  // or the memory cannot be had.
  ShmWriter(const std::string& name, const ChannelShape& shape);
  ~ShmWriter() { close(); }
  ShmWriter(const ShmWriter&) = delete;
  ShmWriter& operator=(const ShmWriter&) = delete;

  void write(std::span<const std::uint64_t> record) { write_record(ring_, ++number_, record); }
  // Tells readers that this was all, and takes the name back.
  void close();
  bool is_closed() const { return segment_.words() == nullptr; }
  std::uint64_t num_written() const { return number_; }

 private:
  std::string path_;
  ShmSegment segment_;
  SeqlockRing ring_;
  std::uint64_t number_ = 0;
};

class ShmReader {
 public:
  // Throws std::invalid_argument for a bad name.
  ShmReader(const std::string& name, std::uint64_t version);

  // Looks for a newer record, and for a new writer if the last one has gone. True if record() is another one than
  // before. Never waits. With `asks` it asks the kernel whether the writer of an old record still lives, half a
  // microsecond; without, what the memory tells must do.
  bool poll(std::int64_t now_ns, bool asks = true);

  // As of the last poll().
  SourceState state() const { return state_; }
  const std::vector<std::uint64_t>& record() const { return *record_; }  // the last good one of this writer
  // The same, which does not change while somebody keeps it.
  std::shared_ptr<const std::vector<std::uint64_t>> kept_record() const { return record_; }
  std::uint64_t number() const { return number_; }                      // of record(), from 1; 0: none
  const std::vector<std::uint64_t>& attributes() const { return attributes_; }
  std::uint64_t generation() const { return generation_; }  // how many writers were met
  std::int64_t writer_pid() const { return writer_pid_; }   // in its own namespace; 0: none yet
  const SeqlockRing& ring() const { return ring_; }  // null before a writer was met
  std::uint64_t num_misses() const { return num_misses_; }  // polls that the writer was too fast for

 private:
  static constexpr std::int64_t kLookEvery = 10'000'000;  // ns between questions to the kernel

  bool attach();
  bool is_held() const;
  bool copy_newest();

  std::string path_;
  std::uint64_t version_;
  ShmSegment segment_;
  SeqlockRing ring_;
  SourceState state_ = SourceState::missing;
  using Words = std::vector<std::uint64_t>;
  std::shared_ptr<Words> record_ = std::make_shared<Words>();
  Words attributes_;
  std::uint64_t number_ = 0, generation_ = 0, num_misses_ = 0;
  std::int64_t writer_pid_ = 0;
  std::int64_t next_look_ = 0;
};

}  // namespace simcluster
