// One request inside a scheduler.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "units.hpp"

namespace simcluster {

// Consecutive token ids first, first + 1, ...; what they are matters only to prefix caching.
struct TokenRun {
  std::uint64_t first = 0;
  std::int64_t count = 0;
};

// Whether the runs make up a prompt of this many tokens; no runs stand for any prompt that shares nothing.
inline bool covers(std::span<const TokenRun> prompt, std::int64_t tokens) {
  if (prompt.empty()) return true;
  for (const TokenRun& run : prompt) {
    if (run.count < 1 || run.count > tokens) return false;
    tokens -= run.count;
  }
  return tokens == 0;
}

// What the engine is told about a request, its true end included.
struct RequestSpec {
  std::int64_t id = 0;  // unique among the requests of one engine
  std::int64_t num_prompt_tokens = 0;
  std::int64_t max_tokens = 0;          // the request ends here with reason length
  std::int64_t eos_at = 0;              // this output token, counted from 1, is the EOS; 0: none
  std::int64_t visible_max_tokens = 0;  // what a snapshot shows as max_tokens
  std::int64_t priority = 0;
  Picoseconds arrival_time = 0;     // second key of the priority policy
  std::span<const TokenRun> prompt{};  // empty: shares no prefix with any other request
  std::uint64_t first_output = 0;   // token id of the first output; 0: shares nothing
};

enum class Status : std::uint8_t { waiting, running, preempted, gone };
enum class EndReason : std::uint8_t { none, stop, length, abort, kv_capacity, exceeds_context };

// Scheduling state; VLLM_SCHEDULER.md section 1.1 names the fields. One cache line: all that a pass or a result reads.
// Lengths and counts are bounded by the context, so 32 bits hold them.
struct alignas(64) RequestState {
  std::int64_t id = -1;
  std::int32_t num_prompt_tokens = 0;
  std::int32_t num_output_tokens = 0;      // delivered so far
  std::int32_t num_computed_tokens = 0;    // computed or scheduled to be
  std::int32_t num_inflight_tokens = 0;    // tokens of batches whose results are not processed
  std::int32_t num_stale_tokens = 0;       // those scheduled before the last preemption
  std::int32_t num_sampled_tokens = 0;     // delivered or in flight
  std::int32_t num_blocks = 0;
  std::int32_t num_registered_tokens = 0;  // whose full blocks have a hash (prefix caching by counts)
  std::int32_t max_tokens = 0;
  std::int32_t eos_at = 0;
  std::int32_t next_running = -1, prev_running = -1;
  std::uint32_t join_pass = 0;  // lockstep: the fields stand as of this pass; its low bits, since none lives for 2^31
  std::int8_t num_output_placeholders = 0;  // sampled by batches in flight (asynchronous loop)
  Status status = Status::gone;
  bool is_prefill_chunk = false;      // after its last pass the known tokens were not all scheduled
  bool in_batch : 1 = false;          // scratch of one pass
  bool lockstep : 1 = false;          // see scheduler.hpp
  bool excluded : 1 = false;  // its last token is in flight, no pass schedules it any more (asynchronous loop)

  std::int64_t num_tokens() const { return std::int64_t{num_prompt_tokens} + num_output_tokens; }
  // Known tokens without a processed result. A decoding request misses only its newest token, which counts for none.
  std::int64_t prefill_left() const {
    const std::int64_t processed = num_computed_tokens - (num_inflight_tokens - num_stale_tokens);
    const std::int64_t missing = num_tokens() - processed;
    return num_output_tokens > 0 && missing <= 1 ? 0 : missing;
  }
  bool operator==(const RequestState&) const = default;
};
static_assert(sizeof(RequestState) == 64);

// What is rarely asked of a request.
struct RequestDetail {
  std::int64_t priority = 0;
  Picoseconds arrival_time = 0;
  std::int32_t visible_max_tokens = 0;
  std::int32_t num_cached_tokens = -1;  // prefix hit of the first admission; -1 before it
  std::int32_t num_preemptions = 0;
  std::uint32_t sequence = 0;           // order of admission, modulo 2^32

  bool operator==(const RequestDetail&) const = default;
};

// A count that its bounds keep within 32 bits.
constexpr std::int32_t narrow(std::int64_t count) { return static_cast<std::int32_t>(count); }

// Sums over one batch that its duration depends on. Source: paper eq. 9.
struct StepFeatures {
  std::int64_t num_tokens = 0;
  std::int64_t num_decodes = 0;
  std::int64_t sum_decode_context = 0;  // S_dec
  std::int64_t prefill_attention = 0;   // A_pre = sum of p*c + p*(p+1)/2
  std::int64_t num_prefills = 0;

  bool operator==(const StepFeatures&) const = default;

  // A decode computes one token beyond the prompt; everything else is a prefill of p tokens after c.
  void add(std::int64_t context, std::int64_t tokens, bool decode) {
    num_tokens += tokens;
    if (decode) {
      num_decodes += 1;
      sum_decode_context += context;
    } else {
      num_prefills += 1;
      prefill_attention += tokens * context + tokens * (tokens + 1) / 2;
    }
  }
};

struct BatchEntry {
  std::int64_t id = -1;            // tells whether the slot still holds this request
  std::int32_t slot = -1;
  std::int32_t start = 0;          // tokens computed before the batch
  std::int32_t num_tokens = 0;
  std::int32_t sample_index = -1;  // which output token it samples, counted from 0; -1: none
  bool decode = false;
  bool first_admission = false;
};

struct Batch {
  std::vector<BatchEntry> entries;
  StepFeatures features;
  std::int64_t pass = 0;          // number of the pass that made it
  std::int64_t num_lockstep = 0;  // decodes that have no entry, in front of the entries

  bool empty() const { return features.num_tokens == 0; }
  // Nobody joined the decodes in it: one chunk of a prefill at most, and not its last.
  bool unchanging() const {
    return entries.empty() || (entries.size() == 1 && entries.front().sample_index < 0);
  }
};

}  // namespace simcluster
