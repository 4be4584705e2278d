// Jumps: a stretch of steps whose composition does not change, in closed form. Equal to stepping, bit for bit, since
// every duration is a whole number of picoseconds and grows by the same number from step to step.
#include <algorithm>
#include <cmath>

#include "engine.hpp"
#include "jump.hpp"

namespace simcluster {
namespace {

// The most steps, at most `most`, that take no longer than `available`. A square root guesses, integers decide.
std::int64_t most_within(Picoseconds first, Picoseconds growth, Picoseconds available, std::int64_t most) {
  if (available < 0) return 0;
  if (stretch_time(first, growth, most) <= available) return most;
  const double half = static_cast<double>(growth) / 2;
  const double b = static_cast<double>(first) - half;
  const double x = static_cast<double>(available);
  const double root = b + std::sqrt(b * b + 4 * half * x);
  auto n = root > 0 ? static_cast<std::int64_t>(std::min(2 * x / root, static_cast<double>(most))) : most;
  n = std::clamp<std::int64_t>(n, 0, most);
  while (n > 0 && stretch_time(first, growth, n) > available) --n;
  while (n < most && stretch_time(first, growth, n + 1) <= available) ++n;
  return n;
}

}  // namespace

bool Engine::jump(Picoseconds limit) {
  if (options_.record_steps || noise_.factors || num_flights_ != depth()) return false;
  const Picoseconds bound = std::min(limit, next_input());
  const std::int32_t partial = scheduler_.partial_prefill();
  for (std::size_t i = 0; i < num_flights_; ++i) {
    const Batch& batch = flight(i).batch;
    if (flight(i).end >= bound || batch.empty() || !batch.unchanging()) return false;
    // The chunk of a prefill evicted meanwhile: its tokens in flight are still to be counted down.
    if (!batch.entries.empty() && batch.entries.front().slot != partial) return false;
  }
  SteadyState steady = scheduler_.steady_state(depth());
  const auto ahead = static_cast<std::int64_t>(depth());
  if (steady.passes <= ahead) return false;

  StepFeatures features = features_of(steady, 0);
  const Picoseconds device = step_time_.device_time(features);
  Picoseconds first = step_time_.period(device, async_);
  Picoseconds growth = step_time_.device_time(features_of(steady, 1)) - device;
  if (async_ && device < step_time_.host) {  // the host is slower: equal periods until the device is
    if (growth > 0) steady.passes = std::min(steady.passes, (step_time_.host - device - 1) / growth + 1);
    growth = 0;
  }
  // The results before pass i of the stretch end step i of those in flight, or step i - depth of the stretch.
  const Picoseconds last = flight(num_flights_ - 1).end;
  const std::int64_t passes =
      ahead + most_within(first, growth, bound - 1 - last, std::min(steady.passes, kLongestJump) - ahead);
  if (passes <= ahead) return false;

  const auto at = [&](std::int64_t n) { return last + static_cast<Picoseconds>(stretch_time(first, growth, n)); };
  const std::int64_t before = scheduler_.num_passes();
  clock_ = at(passes - ahead);
  intake_ = clock_;
  busy_time_ += at(passes) - last;
  num_steps_ += passes;
  scheduler_.skip(steady, passes, depth());
  for (std::int64_t i = 0; i < ahead; ++i) {
    const std::int64_t step = passes - ahead + i;
    InFlight& f = flight(static_cast<std::size_t>(i));
    f.start = at(step);
    f.end = at(step + 1);
    f.batch.pass = before + step;
    f.batch.num_lockstep = steady.num_decodes;
    f.batch.features = features_of(steady, step);
    f.batch.entries.clear();
    if (steady.chunk > 0) f.batch.entries.push_back(partial_entry(steady, step));
  }
  device_free_ = at(passes);
  iterations_without_token_ = 0;
  livelock_limit_ = kLeastLivelockLimit;
  return true;
}

StepFeatures Engine::features_of(const SteadyState& steady, std::int64_t step) {
  StepFeatures features;
  features.num_tokens = features.num_decodes = steady.num_decodes;
  features.sum_decode_context = steady.decode_context + step * steady.num_decodes;
  if (steady.chunk > 0) features.add(steady.chunk_start + step * steady.chunk, steady.chunk, false);
  return features;
}

BatchEntry Engine::partial_entry(const SteadyState& steady, std::int64_t step) const {
  const std::int32_t slot = scheduler_.partial_prefill();
  const std::int64_t start = steady.chunk_start + step * steady.chunk;
  return {scheduler_.request(slot).id, slot, narrow(start), narrow(steady.chunk), -1, false, false};
}

}  // namespace simcluster
