#include "frontier.hpp"

#include <algorithm>

namespace simcluster {

LeastTime::LeastTime(const StepTimeModel& model, const SchedulerConfig& config)
    : budget(config.max_num_batched_tokens) {
  const auto coefficients = {model.b0, model.b1, model.b1x, model.b2, model.b3, model.b4, model.b5, model.host};
  known = std::all_of(coefficients.begin(), coefficients.end(), [](Picoseconds b) { return b >= 0; });
  if (!known) return;
  batch = model.b0 + (config.async_scheduling ? 0 : model.host);
  hinge = model.hinge_tokens;
  beyond = hinge > 0 ? std::min(model.b1x, batch / hinge) : model.b1x;
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
  least.one_hinge = one_hinge && other.one_hinge && hinge == other.hinge && beyond == other.beyond;
  least.budget = std::max(budget, other.budget);
  return least;
}

Picoseconds LeastTime::prompt(std::int64_t tokens) const {
  const __int128 n = tokens;
  const __int128 time = token * n + pair * (n * (n + 1) / 2) + prefill + (n - 1) / budget * batch;
  return static_cast<Picoseconds>(std::clamp<__int128>(time, 0, kNever));
}

Picoseconds LeastTime::past_hinge(std::int64_t tokens) const {
  if (!one_hinge || tokens > budget) return -kNever;
  const auto time = static_cast<__int128>(beyond) * (tokens - hinge);
  return static_cast<Picoseconds>(std::clamp<__int128>(time, -kNever, kNever));
}

Picoseconds LeastTime::by_context(const StepTimeModel& model, const StepFeatures& features) const {
  if (features.num_prefills > 0) return 0;
  const __int128 time = static_cast<__int128>(model.b4) * features.sum_decode_context;
  return static_cast<Picoseconds>(std::min<__int128>(time, batch - beyond * std::max<std::int64_t>(hinge, 0)));
}

PromptTime::PromptTime(const StepTimeModel& model, std::int64_t prompt_tokens)
    : tokens(prompt_tokens), per_token_beyond(model.b1x), tokens_beyond(prompt_tokens - model.hinge_tokens) {
  const __int128 n = prompt_tokens;
  const __int128 time = model.b1 * n + model.b3 * (n * (n + 1) / 2) + model.b5;
  alone = static_cast<Picoseconds>(std::clamp<__int128>(time, -kNever, kNever));
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

Outlook Outlook::of(const Room& room, Picoseconds from, const StepTimeModel& model, const SchedulerConfig& config,
                    const LeastTime& least) {
  Outlook outlook;
  outlook.earliest = from;
  outlook.until = -1;
  const bool empty = room.features.num_tokens == 0;
  const Picoseconds device = model.device_time(room.features);
  if (room.open()) {
    StepFeatures with = room.features;
    with.num_prefills = std::max<std::int64_t>(with.num_prefills, 1);
    outlook.device = model.device_time(with) - (room.features.num_prefills > 0 ? 0 : model.b5);
    outlook.before_hinge = std::min(with.num_tokens, model.hinge_tokens);
    outlook.until = room.until;
    outlook.start = room.start;
    outlook.longest = std::min({room.tokens, room.blocks * config.block_size, config.max_model_len - 1});
  }
  if (!least.known) return outlook;
  const bool async = config.async_scheduling;
  outlook.at_least_later = room.start + (empty ? 0 : model.period(device, async)) + least.batch;
  outlook.at_least = outlook.at_least_hinged = outlook.at_least_later;
  if (!room.open() || empty) return outlook;
  // A part of the prompt is in this batch, or all of it in later ones.
  outlook.at_least = room.start + device + (async ? 0 : model.host) + least.by_context(model, room.features);
  outlook.at_least_hinged = outlook.at_least + least.by_tokens(room.features);
  return outlook;
}

// What the engine looks like where it has stopped.
void Frontier::look() {
  room_ = lost_ ? Room{} : engine_.room();
  from_ = std::max(from_, engine_.last_input());
  outlook_ = Outlook::of(room_, from_, engine_.step_time(), config(), lost_ ? LeastTime{} : least_);
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
