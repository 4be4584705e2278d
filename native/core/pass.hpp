// Scratch of one scheduling pass.
#pragma once

#include <cstdint>

#include "scheduler.hpp"

namespace simcluster {

struct Scheduler::Pass {
  std::int64_t budget = 0;
  std::int64_t threshold = 0;  // cap on the tokens of one prefill; 0: none
  std::int64_t interval = 1;
  bool hold = false;           // prefill cadence: no prefill in this pass
  bool did_prefill = false;
};

}  // namespace simcluster
