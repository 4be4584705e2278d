#include "config.hpp"

#include <cmath>
#include <limits>

namespace simcluster {
namespace {

constexpr std::int64_t kLargest = std::numeric_limits<std::int32_t>::max();

std::string check(const char* name, std::int64_t value, std::int64_t least) {
  if (value >= least && value <= kLargest) return {};
  return std::string(name) + " = " + std::to_string(value) + "; must be from " + std::to_string(least) +
         " to " + std::to_string(kLargest);
}

}  // namespace

std::string SchedulerConfig::validate() const {
  for (const std::string& fault : {
           check("max_num_batched_tokens", max_num_batched_tokens, 1),
           check("max_num_seqs", max_num_seqs, 1),
           check("max_num_active_seqs", max_num_active_seqs, 0),
           check("max_model_len", max_model_len, 1),
           check("block_size", block_size, 1),
           check("num_gpu_blocks", num_gpu_blocks, 2),
           check("long_prefill_token_threshold", long_prefill_token_threshold, 0),
           check("prefill_schedule_interval", prefill_schedule_interval, 1),
       }) {
    if (!fault.empty()) return fault;
  }
  if (!(watermark >= 0.0 && watermark < 1.0)) {
    return "watermark = " + std::to_string(watermark) + "; must be at least 0 and below 1";
  }
  if (!enable_chunked_prefill && max_num_batched_tokens < max_model_len) {
    return "max_num_batched_tokens = " + std::to_string(max_num_batched_tokens) +
           "; must be at least max_model_len = " + std::to_string(max_model_len) +
           " without enable_chunked_prefill, or a long prompt would wait for ever";
  }
  return {};
}

}  // namespace simcluster
