// Where a request of a snapshot stands among the decodes in lockstep.
#pragma once

#include <algorithm>
#include <cstdint>

#include "config.hpp"
#include "request_state.hpp"

namespace simcluster {

// A request in lockstep counts its samples from the join on; those in flight are decodes, but for the join itself.
inline std::int32_t decodes_in_flight(const RequestState& r) {
  const auto join = static_cast<std::int32_t>(r.join_pass);
  return r.num_sampled_tokens - r.num_output_tokens - (join >= 0 ? 1 : 0);
}

// The output token with which a request ends, counted from 1, and whether that is known beforehand.
struct Ending {
  std::int32_t last = 0;
  bool known = false;

  static Ending of(std::int32_t max_tokens, std::int32_t eos_at, std::int32_t num_prompt_tokens,
                   std::int32_t max_model_len) {
    const std::int32_t limit = std::min(max_tokens, max_model_len - num_prompt_tokens);
    const bool known = eos_at <= 0 || eos_at >= limit;
    return {known ? limit : eos_at, known};
  }
};

// Passes are counted from the oldest batch in flight; `ahead` of them are made.
struct Rejoin {
  Rejoin(const SchedulerConfig& config, std::int64_t num_in_flight)
      : ahead(narrow(num_in_flight)),
        max_model_len(narrow(config.max_model_len)),
        block_size(narrow(config.block_size)),
        phase(narrow(num_in_flight % config.block_size)),
        async(config.async_scheduling) {}

  std::int32_t ahead, max_model_len, block_size, phase;
  bool async;
  // Of the request last looked at: the pass that samples its last token, its context as of pass `ahead`, and the phase
  // of the passes in which it needs a block.
  std::int32_t last_pass = 0, context = 0, block_phase = 0;

  // Whether it is in every batch in flight since it joined.
  bool in_step(const RequestState& r) const {
    const std::int32_t joined = std::max(static_cast<std::int32_t>(r.join_pass), 0);
    return r.num_sampled_tokens - r.num_output_tokens + joined == ahead;
  }
  // The pass that samples its last token. Of one in step it cannot be before the last batch in flight, or its last but
  // one where that was made in vain.
  std::int32_t last_pass_of(const RequestState& r, Ending end) const {
    return end.last - r.num_output_tokens + std::max(static_cast<std::int32_t>(r.join_pass), 0) - 1;
  }
  bool may_end(std::int32_t pass, Ending end) const { return pass >= ahead - 1 - (async && !end.known ? 1 : 0); }
  // Of one in step.
  std::int32_t block_phase_of(const RequestState& r) const {
    const std::int32_t at = phase + r.num_blocks * block_size - r.num_computed_tokens;
    return at >= block_size ? at - block_size : at;
  }

  // False if the expected end contradicts what is in flight: then it has to be visited.
  bool operator()(const RequestState& r, Ending end) {
    const auto join = static_cast<std::int32_t>(r.join_pass);
    const std::int32_t decodes = decodes_in_flight(r);
    const std::int32_t left = end.last - r.num_sampled_tokens + decodes;
    const std::int32_t placeholders = async ? decodes + (join < 0 ? 0 : 1) : 0;
    std::int32_t room = r.num_blocks * block_size - r.num_computed_tokens;
    const std::int32_t together = ahead - 1 - join;
    if (std::min(together, left + (async && !end.known ? 1 : 0)) != decodes ||
        r.num_output_placeholders != placeholders || room < 0 || room >= block_size) {
      return false;
    }
    last_pass = join + left;
    context = r.num_computed_tokens - decodes + together;
    room -= together - decodes;
    block_phase = phase + room + (room < 0 ? block_size : 0);
    if (block_phase >= block_size) block_phase -= block_size;
    return true;
  }
};

}  // namespace simcluster
