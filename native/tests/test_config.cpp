#include <cmath>
#include <functional>
#include <stdexcept>
#include <string>

#include "check.hpp"
#include "config.hpp"
#include "helpers.hpp"

using namespace simcluster;
using namespace simcluster::testing;

namespace {

void each_option_out_of_range_is_named() {
  const auto refused = [](const char* name, const std::function<void(SchedulerConfig&)>& change) {
    SchedulerConfig config = plain(false);
    CHECK(config.validate().empty());
    change(config);
    CHECK(config.validate().starts_with(std::string(name) + " = "));
    CHECK(throws<std::invalid_argument>([&] { Engine(config, u_step()); }));
  };
  refused("max_num_batched_tokens", [](SchedulerConfig& c) { c.max_num_batched_tokens = 0; });
  refused("max_num_seqs", [](SchedulerConfig& c) { c.max_num_seqs = 0; });
  refused("max_num_active_seqs", [](SchedulerConfig& c) { c.max_num_active_seqs = -1; });
  refused("max_model_len", [](SchedulerConfig& c) { c.max_model_len = 0; });
  refused("block_size", [](SchedulerConfig& c) { c.block_size = 0; });
  refused("num_gpu_blocks", [](SchedulerConfig& c) { c.num_gpu_blocks = 1; });
  refused("num_gpu_blocks", [](SchedulerConfig& c) { c.num_gpu_blocks = std::int64_t{1} << 31; });
  refused("long_prefill_token_threshold", [](SchedulerConfig& c) { c.long_prefill_token_threshold = -1; });
  refused("prefill_schedule_interval", [](SchedulerConfig& c) { c.prefill_schedule_interval = 0; });
  refused("watermark", [](SchedulerConfig& c) { c.watermark = 1.0; });
  refused("watermark", [](SchedulerConfig& c) { c.watermark = std::nan(""); });
  refused("max_num_batched_tokens", [](SchedulerConfig& c) { c.enable_chunked_prefill = false; });
}

void blocks_are_counted_without_the_null_block() {
  const SchedulerConfig config = plain(false, 7, 4);
  CHECK(config.num_gpu_blocks == 8 && config.num_usable_blocks() == 7);
  CHECK(config.blocks_for(0) == 0);
  CHECK(config.blocks_for(1) == 1);
  CHECK(config.blocks_for(4) == 1);
  CHECK(config.blocks_for(5) == 2);
}

}  // namespace

int main() {
  each_option_out_of_range_is_named();
  blocks_are_counted_without_the_null_block();
  return report("config");
}
