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

// Scheduling state; VLLM_SCHEDULER.md section 1.1 names the fields. Trivially copyable.
struct RequestState {
  std::int64_t id = -1;
  std::int64_t num_prompt_tokens = 0;
  std::int64_t num_output_tokens = 0;  // delivered so far
  std::int64_t max_tokens = 0;
  std::int64_t eos_at = 0;
  std::int64_t visible_max_tokens = 0;
  std::int64_t num_computed_tokens = 0;      // computed or scheduled to be
  std::int64_t num_output_placeholders = 0;  // sampled by batches in flight (asynchronous loop)
  std::int64_t num_inflight_tokens = 0;      // tokens of batches whose results are not processed
  std::int64_t num_stale_tokens = 0;         // those scheduled before the last preemption
  std::int64_t num_sampled_tokens = 0;       // delivered or in flight
  std::int64_t num_blocks = 0;
  std::int64_t num_cached_tokens = -1;  // prefix hit of the first admission; -1 before it
  std::int64_t num_preemptions = 0;
  std::int64_t priority = 0;
  Picoseconds arrival_time = 0;
  Status status = Status::gone;
  std::int64_t num_registered_tokens = 0;  // whose full blocks have a hash (prefix caching by counts)
  std::int64_t sequence = 0;               // order of admission
  std::int32_t next_running = -1, prev_running = -1;
  bool is_prefill_chunk = false;  // after its last pass the known tokens were not all scheduled
  bool in_batch = false;          // scratch of one pass

  // Lockstep (see scheduler.hpp): while set, the fields above stand as of pass join_pass.
  bool lockstep = false;
  bool excluded = false;   // its last token is in flight, no pass schedules it any more (asynchronous loop)
  bool known_end = false;  // ends where max_tokens or the context limit does, so no pass goes beyond
  std::int64_t join_pass = 0;
  std::int64_t join_tokens = 0;  // tokens it computed in that pass
  std::int64_t last_pass = 0;    // the pass that samples its last token

  std::int64_t num_tokens() const { return num_prompt_tokens + num_output_tokens; }
};

// Sums over one batch that its duration depends on. Source: paper eq. 9.
struct StepFeatures {
  std::int64_t num_tokens = 0;
  std::int64_t num_decodes = 0;
  std::int64_t sum_decode_context = 0;  // S_dec
  std::int64_t prefill_attention = 0;   // A_pre = sum of p*c + p*(p+1)/2
  std::int64_t num_prefills = 0;

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
  std::int32_t slot = -1;
  bool decode = false;
  bool admitted = false;           // taken from the waiting queue by this pass
  std::int64_t id = -1;            // tells whether the slot still holds this request
  std::int64_t start = 0;          // tokens computed before the batch
  std::int64_t num_tokens = 0;
  std::int64_t sample_index = -1;  // which output token it samples, counted from 0; -1: none
};

struct Batch {
  std::vector<BatchEntry> entries;
  StepFeatures features;
  std::int64_t pass = 0;          // number of the pass that made it
  std::int64_t num_lockstep = 0;  // decodes that have no entry, in front of the entries

  bool empty() const { return entries.empty() && num_lockstep == 0; }
};

}  // namespace simcluster
