#include "frontier.hpp"

#include <algorithm>

namespace simcluster {

LeastTime::LeastTime(const StepTimeModel& model, const SchedulerConfig& config)
    : budget(config.max_num_batched_tokens) {
  const auto coefficients = {model.b0, model.b1, model.b1x, model.b2, model.b3, model.b4, model.b5, model.host};
  known = std::all_of(coefficients.begin(), coefficients.end(), [](Picoseconds b) { return b >= 0; });
  if (!known) return;
  batch = model.b0;
  token = model.b1;
  pair = model.b3;
  prefill = model.b5;
}

LeastTime LeastTime::operator&(const LeastTime& other) const {
  LeastTime least = *this;
  least.known = known && other.known;
  least.batch = std::min(batch, other.batch);
  least.token = std::min(token, other.token);
  least.pair = std::min(pair, other.pair);
  least.prefill = std::min(prefill, other.prefill);
  least.budget = std::max(budget, other.budget);
  return least;
}

Picoseconds LeastTime::prompt(std::int64_t tokens) const {
  const __int128 n = tokens;
  const __int128 time = token * n + pair * (n * (n + 1) / 2) + prefill + (n - 1) / budget * batch;
  return static_cast<Picoseconds>(std::clamp<__int128>(time, 0, kNever));
}

void Frontier::start() {
  from_ = engine_.intake() + 1;
  lost_ = false;
  look();
}

bool Frontier::move_on(Picoseconds at) {
  if (at < from_ || lost_) return false;
  const bool looked_at = engine_.in_pass() && at <= room_.until;  // that pass was found to have no room
  try {
    if (!looked_at) {
      engine_.run_before(at);
      from_ = std::max(from_, engine_.intake() + 1);
    }
    lost_ = !engine_.stop_in_pass(at);
  } catch (const LivelockError&) {
    lost_ = true;
  }
  engine_.events().clear();
  look();
  return is_at(at);
}

// What the engine looks like where it has stopped.
void Frontier::look() {
  room_ = lost_ ? Room{} : engine_.room();
  from_ = std::max(from_, engine_.last_input());
  outlook_ = Outlook{};
  outlook_.earliest = from_;
  outlook_.until = -1;
  const bool empty = room_.features.num_tokens == 0;
  const Picoseconds device = engine_.step_time().device_time(room_.features);
  if (room_.open()) {
    outlook_.device = device;
    outlook_.until = room_.until;
    outlook_.start = room_.start;
    outlook_.features = room_.features;
    outlook_.longest = std::min({room_.tokens, room_.blocks * config().block_size, config().max_model_len - 1});
  }
  if (!least_.known || lost_) return;
  const Picoseconds end = room_.start + (empty ? 0 : device);
  outlook_.at_least_later = end + least_.batch;
  outlook_.at_least = room_.open() && !empty ? end : outlook_.at_least_later;  // a part of this batch, or a later one
}

Picoseconds Frontier::run_with(Engine& engine, const Submission& candidate) const {
  try {
    if (engine.in_pass() && candidate.at <= room_.until) {
      engine.join_pass(candidate);
    } else if (!engine.submit(candidate)) {
      return kNever;
    }
    return engine.run_to_first_token(candidate.id);
  } catch (const LivelockError&) {
    return kNever;
  }
}

Picoseconds Frontier::run_on(const Submission& candidate, Engine& copy) const {
  copy = engine_;
  return run_with(copy, candidate);
}

bool Frontier::add(const Submission& submission) {
  if (submission.at < from_ || lost_) return false;
  if (engine_.refuses(submission.prompt_tokens, submission.max_tokens)) return true;
  if (engine_.in_pass() && submission.at <= room_.until) {
    engine_.join_pass(submission);
  } else {
    engine_.submit(submission);
  }
  look();
  return true;
}

}  // namespace simcluster
