// Options of one instance's scheduler, under vLLM's own names.
#pragma once

#include <cstdint>
#include <string>

namespace simcluster {

enum class Policy : std::uint8_t { fcfs, priority };
enum class VllmVersion : std::uint8_t { v0_32, v0_33 };

struct SchedulerConfig {
  std::int64_t max_num_batched_tokens = 8192;
  std::int64_t max_num_seqs = 1024;
  std::int64_t max_num_active_seqs = 0;  // 0: unset, max_num_seqs holds
  std::int64_t max_model_len = 40960;
  std::int64_t block_size = 16;
  std::int64_t num_gpu_blocks = 0;  // including the null block, which is never given out
  std::int64_t long_prefill_token_threshold = 0;
  std::int64_t prefill_schedule_interval = 1;
  double watermark = 0.0;
  Policy policy = Policy::fcfs;
  VllmVersion vllm_version = VllmVersion::v0_33;
  bool enable_chunked_prefill = true;
  bool enable_prefix_caching = true;
  bool long_prefill_token_threshold_adaptive = false;
  bool scheduler_reserve_full_isl = true;
  bool async_scheduling = true;
  // Keep block tables in vLLM's free-list order although caching is off (conformance); timing never needs it.
  bool track_blocks = false;
  // Prompts may share prefixes. If not, prefix caching can only give a preempted request its own blocks back, and
  // counts suffice.
  bool shared_prefixes = true;

  std::int64_t num_seats() const { return max_num_active_seqs > 0 ? max_num_active_seqs : max_num_seqs; }
  std::int64_t num_watermark_blocks() const {
    return static_cast<std::int64_t>(watermark * static_cast<double>(num_gpu_blocks));
  }
  std::int64_t num_usable_blocks() const { return num_gpu_blocks - 1; }
  std::int64_t blocks_for(std::int64_t tokens) const { return (tokens + block_size - 1) / block_size; }

  // Empty if every option is in range, else what is wrong: "name = value; must be ...".
  std::string validate() const;
};

}  // namespace simcluster
