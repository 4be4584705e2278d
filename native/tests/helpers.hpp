// Short ways to set up an engine: the step time of the public cases, 10 ms a batch and 1 ms a token.
#pragma once

#include <vector>

#include "engine.hpp"

namespace simcluster::testing {

inline constexpr Picoseconds kMs = 1'000'000'000;

inline StepTimeModel u_step() {
  StepTimeModel model;
  model.b0 = 10 * kMs;
  model.b1 = kMs;
  return model;
}

inline SchedulerConfig plain(bool async, std::int64_t usable_blocks = 1000, std::int64_t block_size = 4) {
  SchedulerConfig config;
  config.async_scheduling = async;
  config.enable_prefix_caching = false;
  config.num_gpu_blocks = usable_blocks + 1;
  config.block_size = block_size;
  return config;
}

inline Submission ask(std::int64_t id, Picoseconds at, std::int64_t prompt, std::int64_t output) {
  Submission s;
  s.id = id;
  s.at = at;
  s.prompt_tokens = prompt;
  s.output_tokens = output;
  return s;
}

// Times [ms] of the tokens of one request.
inline std::vector<Picoseconds> tokens_of(Engine& engine, std::int64_t id) {
  std::vector<Picoseconds> times;
  for (const Event& e : engine.events()) {
    if (e.id == id && e.kind == EventKind::token) times.push_back(e.at / kMs);
  }
  return times;
}

inline Event last_event(Engine& engine, std::int64_t id) {
  Event last;
  for (const Event& e : engine.events()) {
    if (e.id == id) last = e;
  }
  return last;
}

}  // namespace simcluster::testing
