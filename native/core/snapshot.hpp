// What an instance publishes about itself, and the way back to an engine.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <vector>

#include "engine.hpp"
#include "rejoin.hpp"

namespace simcluster {

// How a router expects a request to end.
struct ExpectedEnd {
  std::int64_t output_tokens = 1;
  bool by_length = false;  // known beforehand, as by max_tokens; otherwise by an EOS

  // A request that has already produced as much goes on for one token.
  std::int32_t output_of(const RequestState& r) const {
    constexpr std::int64_t kLargest = std::numeric_limits<std::int32_t>::max();
    return narrow(std::clamp<std::int64_t>(output_tokens, r.num_output_tokens + 1, kLargest));
  }
  Ending of(const RequestState& r, std::int32_t max_model_len) const {
    const std::int32_t output = output_of(r);
    return by_length ? Ending::of(std::min(output, r.max_tokens), 0, r.num_prompt_tokens, max_model_len)
                     : Ending::of(r.max_tokens, output, r.num_prompt_tokens, max_model_len);
  }
};

// What an instance tells of the next batch without a snapshot.
struct Ahead {
  Picoseconds device_free = 0;  // when the device can take it by the believed step times, no result being late
  Picoseconds intake = -1;      // requests that reached the engine up to here were taken,
  std::int64_t num_taken = 0;   // so many so far
  std::int64_t num_batches = 0;  // handed to the device so far
  // Decodes in it if none of them ends; 0: not known.
  std::int64_t num_decodes = 0, decode_context = 0;
};

// Everything needed to continue an instance exactly but the ends of its requests, the duration of the step in
// flight and the blocks' identities. Source: VLLM_SCHEDULER.md section 9; restoring counts blocks only.
struct Snapshot {
  static constexpr std::uint32_t kVersion = 3;

  struct Entry {
    std::int32_t request = -1;  // index into requests; -1: it has ended meanwhile
    std::int32_t num_tokens = 0;
    std::int32_t sample_index = -1;

    bool operator==(const Entry&) const = default;
  };
  struct BatchInFlight {
    Picoseconds start = 0;
    StepFeatures features;
    std::int64_t num_lockstep = 0;  // decodes that have no entry, in front of the entries
    std::vector<Entry> entries;

    bool operator==(const BatchInFlight&) const = default;
  };

  // Residents that a snapshot of fixed size had no room for: the last of the running, the last of the waiting.
  struct LeftOut {
    std::int64_t num_running = 0;
    std::int64_t num_waiting = 0;
    std::int64_t prefill_tokens = 0;  // of theirs, still to be computed

    std::int64_t num_resident() const { return num_running + num_waiting; }
    bool operator==(const LeftOut&) const = default;
  };

  std::uint32_t version = kVersion;
  Picoseconds taken_at = 0;  // nothing has ended between the boundary and this instant
  Picoseconds boundary = 0;  // the last pass or result
  Picoseconds intake = -1;   // requests that reached the engine up to here are included; -1: only the ids tell
  bool waiting_for_batch = false;
  bool unflushed_ends = false;
  bool capacity_bound = false;
  std::int64_t num_executed = 0;
  std::int64_t last_prefill = 0;
  std::int64_t num_free_blocks = 0;
  std::int64_t num_running = 0;
  // Running in order, then waiting in order, as they are now; max_tokens is the visible one, eos_at is blank. One with
  // `lockstep` set takes one token from every batch in flight after join_pass, and has no entries there; batches are
  // counted from the oldest in flight, and -1 stands for any before it.
  std::vector<RequestState> requests;
  std::vector<RequestDetail> details;  // of the requests
  std::vector<BatchInFlight> in_flight;
  LeftOut left_out;
  // Sums over the running in lockstep that are in every batch in flight since they joined, as of the next pass: a
  // reader may use them instead of adding up.
  struct Sums {
    std::int64_t count = -1;  // -1: not known
    std::int64_t context = 0;
    std::vector<std::int32_t> by_phase;  // that need a block in the passes of each phase, passes counted as batches are
  };
  Sums in_step;

  static Snapshot capture(const Engine& engine);
  // The same into a snapshot nobody needs any more, whose memory is used again.
  static void capture(const Engine& engine, Snapshot& shot);

  // When the device can take another batch by the believed step times, no result later than expected.
  Picoseconds device_free(const StepTimeModel& believed, bool async) const;
  // The same of a snapshot taken now, and more; num_taken is left out.
  static Ahead ahead(const Engine& engine, const StepTimeModel& believed, bool async);

  // When batch i in flight ends if the one in front of it ends at `before`; a step that was still running when the
  // snapshot was taken does not end earlier.
  Picoseconds end_in_flight(std::size_t i, Picoseconds before, const StepTimeModel& believed, bool async) const;

  // Put in lockstep whatever can be, so that restoring is cheap; the meaning stays.
  void fold_decodes();

  // Continue on `engine`, whose configuration and believed step time stay. ends (n,) says how requests[i] is
  // expected to end; one that has already produced as much goes on for one token.
  // Throws std::invalid_argument for another layout version, another number of ends, or an engine that keeps block
  // identities (prefix caching or track_blocks).
  void restore(Engine& engine, const std::vector<ExpectedEnd>& ends) const;

 private:
  struct Fold;

  static void rewind(RequestState& r, bool async);
  static void visit_again(Engine& engine, std::int32_t slot);
  void restore_running(Engine& engine, const std::vector<ExpectedEnd>& ends) const;
  void restore_batches(Engine& engine, const std::vector<ExpectedEnd>& ends) const;
};

}  // namespace simcluster
