#include "step_time.hpp"

#include <iterator>
#include <stdexcept>

#include "hash.hpp"

namespace simcluster {

void StepTimeModel::fail_overflow() { throw std::overflow_error("the duration of a step is beyond the clock"); }

Picoseconds StepTimeModel::wide_device_time(const StepFeatures& f) const {
  Wide t = b0 + static_cast<Wide>(b1) * f.num_tokens + static_cast<Wide>(b2) * f.sum_decode_context;
  if (f.num_tokens > hinge_tokens) t += static_cast<Wide>(b1x) * (f.num_tokens - hinge_tokens);
  if (f.num_prefills > 0) {
    t += static_cast<Wide>(b3) * f.prefill_attention;
    t += static_cast<Wide>(b4) * f.sum_decode_context;
    t += static_cast<Wide>(b5) * f.num_prefills;
  }
  return checked(t);
}

Picoseconds StepNoise::scaled(Picoseconds device, std::int64_t step) const {
  if (recorded) return step < std::ssize(*factors) ? (*factors)[static_cast<std::size_t>(step)] : device;
  const std::uint64_t draw = mix64(mix64(mix64(seed) ^ instance) ^ static_cast<std::uint64_t>(step));
  const std::int64_t factor = (*factors)[draw % factors->size()];
  return StepTimeModel::checked((static_cast<StepTimeModel::Wide>(device) * factor) >> 32);
}

}  // namespace simcluster
