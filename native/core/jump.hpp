// Durations of a stretch of equally growing steps.
#pragma once

#include <cstdint>

#include "step_time.hpp"

namespace simcluster {

// Of n steps: n*first + growth*n*(n-1)/2.
inline StepTimeModel::Wide stretch_time(StepTimeModel::Wide first, StepTimeModel::Wide growth, std::int64_t n) {
  return first * n + growth * n * (n - 1) / 2;
}

}  // namespace simcluster
