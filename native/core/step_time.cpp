#include "step_time.hpp"

#include <stdexcept>

#include "hash.hpp"

namespace simcluster {

void StepTimeModel::fail_overflow() { throw std::overflow_error("the duration of a step is beyond the clock"); }

Picoseconds StepNoise::scaled(Picoseconds device, std::int64_t step) const {
  const std::uint64_t draw = mix64(mix64(mix64(seed) ^ instance) ^ static_cast<std::uint64_t>(step));
  const std::int64_t factor = (*factors)[draw % factors->size()];
  return StepTimeModel::checked((static_cast<StepTimeModel::Wide>(device) * factor) >> 32);
}

}  // namespace simcluster
