#include "engine.hpp"

#include <algorithm>
#include <optional>
#include <stdexcept>

namespace simcluster {
namespace {

const SchedulerConfig& validated(const SchedulerConfig& config) {
  const std::string fault = config.validate();
  if (!fault.empty()) throw std::invalid_argument(fault);
  return config;
}

// Insert behind everything that is due at the same time or earlier.
template <typename Item>
void insert_by_time(Queue<Item>& queue, const Item& item) {
  if (queue.empty() || queue.back().at <= item.at) {
    queue.push_back(item);
    return;
  }
  const auto place = std::upper_bound(queue.begin(), queue.end(), item.at,
                                      [](Picoseconds at, const Item& other) { return at < other.at; });
  queue.insert(place, item);
}

}  // namespace

RequestSpec Engine::spec_of(const Submission& s, const SchedulerConfig& config) {
  RequestSpec spec;
  const std::int64_t room = config.max_model_len - s.prompt_tokens;
  spec.id = s.id;
  spec.num_prompt_tokens = s.prompt_tokens;
  spec.visible_max_tokens = s.max_tokens > 0 ? std::min(s.max_tokens, room) : room;
  spec.max_tokens = spec.visible_max_tokens;
  if (!s.ends_by_length) {
    spec.eos_at = s.output_tokens;
  } else if (s.max_tokens <= 0) {
    spec.max_tokens = std::min(s.output_tokens, room);
  }
  spec.priority = s.priority;
  spec.arrival_time = s.arrival_time;
  spec.prompt = s.prompt;
  spec.first_output = s.first_output;
  return spec;
}

Engine::Engine(const SchedulerConfig& config, const StepTimeModel& step_time, StepNoise noise,
               EngineOptions options)
    : async_(config.async_scheduling),
      options_(options),
      scheduler_(validated(config)),
      step_time_(step_time),
      noise_(std::move(noise)) {
  if (options_.fast && !options_.record_tokens) scheduler_.use_lockstep();
}

[[gnu::flatten]] bool Engine::submit(const Submission& submission) {
  if (submission.at < now_) throw std::invalid_argument("a request is submitted in the past");
  if (submission.prompt_tokens < 1 || submission.output_tokens < 1) {
    throw std::invalid_argument("a request needs at least one prompt token and one output token");
  }
  scheduler_.check_prompt(submission.prompt, submission.prompt_tokens);
  const SchedulerConfig& config = scheduler_.config();
  const EndReason why = refusal(submission.prompt_tokens, submission.max_tokens);
  if (why != EndReason::none) {
    emit(EventKind::rejected, submission.id, submission.at, 0, why);
    return false;
  }
  insert_by_time(inbox_, Input{submission.at, scheduler_.open(spec_of(submission, config))});
  wake_ = std::min(wake_, submission.at + 1);
  return true;
}

void Engine::cancel(std::int64_t id, Picoseconds at) {
  if (at < now_) throw std::invalid_argument("a request is cancelled in the past");
  insert_by_time(cancels_, Cancel{at, id});
  wake_ = std::min(wake_, at + 1);
}

void Engine::drop_cancelled(Picoseconds before) {
  while (!cancels_.empty() && cancels_.front().at < before) {
    const Cancel c = cancels_.front();
    cancels_.pop_front();
    const auto pending = std::find_if(inbox_.begin(), inbox_.end(),
                                      [&](const Input& input) { return scheduler_.request(input.slot).id == c.id; });
    std::int64_t delivered = 0;
    if (pending != inbox_.end()) {
      scheduler_.withdraw(pending->slot);
      inbox_.erase(pending);
    } else if ((delivered = scheduler_.abort(c.id)) < 0) {
      continue;  // it has already ended
    }
    emit(EventKind::failed, c.id, c.at, delivered, EndReason::abort);
    iterations_without_token_ = 0;  // a request that leaves is progress too
  }
}

[[gnu::flatten]] void Engine::take_arrivals() {
  while (!inbox_.empty() && inbox_.front().at <= clock_) {
    scheduler_.enqueue(inbox_.front().slot);
    last_input_ = std::max(last_input_, inbox_.front().at);
    inbox_.pop_front();
  }
}

void Engine::launch(InFlight& flight) {
  launch_decodes(flight);
  if (!flight.batch.entries.empty()) tell_admissions(flight);
}

void Engine::launch_decodes(InFlight& flight) {
  const StepFeatures& features = flight.batch.features;
  const Picoseconds start = std::max(clock_, device_free_);
  Picoseconds end = start;
  if (!flight.batch.empty()) {
    const Picoseconds device = noise_.apply(step_time_.device_time(features), num_steps_);
    const Picoseconds period = step_time_.period(device, async_);
    end += period;
    busy_time_ += period;
    if (options_.record_steps) {
      steps_.push_back({num_steps_, start, end, features,
                        scheduler_.num_running(),
                        static_cast<std::int64_t>(scheduler_.waiting().size()),
                        scheduler_.num_free_blocks()});
    }
    ++num_steps_;
  }
  flight.start = start;
  flight.end = end;
  device_free_ = end;
}

void Engine::tell_admissions(const InFlight& flight) {
  for (const BatchEntry& entry : flight.batch.entries) {
    if (!entry.first_admission) continue;
    emit(EventKind::scheduled, entry.id, flight.start, scheduler_.detail(entry.slot).num_cached_tokens);
  }
}

void Engine::tell_evictions() {
  for (const Outcome& o : preempted_) emit(EventKind::preempted, o.id, clock_, o.num_output_tokens);
  for (const Outcome& o : failed_) emit(EventKind::failed, o.id, clock_, o.num_output_tokens, o.reason);
  preempted_.clear();
  failed_.clear();
}

void Engine::iterate() {
  take_inputs();
  InFlight* next = nullptr;
  if (scheduler_.has_requests()) {
    Batch* before = nullptr;
    next = &next_flight(before);
    scheduler_.schedule(next->batch, before, preempted_, failed_);
  }
  conclude(next);
}

void Engine::conclude(InFlight* next) {
  bool changed = true;
  if (next != nullptr) {
    launch(*next);
    changed = !next->batch.empty();
    if (!preempted_.empty() || !failed_.empty()) {
      tell_evictions();
      changed = true;
    }
    const bool room = num_flights_ < depth();
    if (room && (!next->batch.empty() || scheduler_.has_requests())) return;
  }
  waiting_for_batch_ = num_flights_ > 0;
  if (!changed) note_stall();
}

void Engine::note_stall() {
  stalled_ = scheduler_.num_running() > 0 || !scheduler_.waiting().empty();
  for (std::size_t i = 0; i < num_flights_; ++i) stalled_ = stalled_ && flight(i).batch.empty();
}

void Engine::process_results() {
  deliver(flight(0));
  first_flight_ ^= 1;
  --num_flights_;
  waiting_for_batch_ = false;
}

void Engine::deliver(const InFlight& done) {
  clock_ = std::max(clock_, done.end);
  apply_cancels(done.end);
  scheduler_.update(done.batch, results_);
  const bool delivered = done.batch.num_lockstep > 0 || !results_.empty();
  if (!results_.empty()) tell_results();
  if (delivered) {
    iterations_without_token_ = 0;
    livelock_limit_ = kLeastLivelockLimit;
  } else {
    count_idle_iteration();
  }
}

void Engine::tell_results() {
  for (const Outcome& r : results_) {
    if (r.num_output_tokens == 1) emit(EventKind::first_token, r.id, clock_, 1);
    if (options_.record_tokens) emit(EventKind::token, r.id, clock_, r.num_output_tokens);
    if (r.reason != EndReason::none) emit(EventKind::finished, r.id, clock_, r.num_output_tokens, r.reason);
  }
  results_.clear();
}

// Two requests can evict each other for ever, in the real engine too. Between two tokens a run can need no more
// passes than there are tokens to prefill, so more than twice that is a livelock.
void Engine::count_idle_iteration() {
  if (++iterations_without_token_ <= livelock_limit_) return;
  std::int64_t tokens = 0;
  for (const std::int32_t slot : scheduler_.running()) tokens += scheduler_.settled(slot).num_tokens();
  for (const std::int32_t slot : scheduler_.waiting()) tokens += scheduler_.settled(slot).num_tokens();
  livelock_limit_ = kLeastLivelockLimit + 2 * tokens;
  if (iterations_without_token_ > livelock_limit_) fail_livelock();
}

void Engine::fail_livelock() const {
  std::string ids;
  std::size_t listed = 0;
  const auto list = [&](std::int32_t slot) {
    if (listed++ >= 8) return;
    if (!ids.empty()) ids += ", ";
    ids += std::to_string(scheduler_.request(slot).id);
  };
  for (const std::int32_t slot : scheduler_.running()) list(slot);
  for (const std::int32_t slot : scheduler_.waiting()) list(slot);
  if (listed > 8) ids += ", and " + std::to_string(listed - 8) + " more";
  throw LivelockError("no token was produced in " + std::to_string(iterations_without_token_) +
                      " iterations; requests without progress: " + ids);
}

Picoseconds Engine::next_input() const {
  const Picoseconds next = inbox_.empty() ? kNever : inbox_.front().at;
  return cancels_.empty() ? next : std::min(next, cancels_.front().at);
}

bool Engine::start_iteration(Picoseconds limit) {
  Picoseconds at = clock_;
  if (idle()) {
    const Picoseconds next = next_input();
    if (next == kNever) {
      if (stalled_) fail_livelock();
      return false;
    }
    at = std::max(clock_, next);
  }
  if (at >= limit) return false;
  clock_ = at;
  stalled_ = false;
  return true;
}

[[gnu::flatten]] inline bool Engine::run_full_row(Picoseconds limit, bool until_told) {
  const auto has_told = [this, until_told, told = until_told ? events_.size() : 0] {
    return until_told && events_.size() != told;
  };
  const bool async = async_;
  InFlight* turn = in_register(&flight(0));  // done, and then the batch that follows the others
  InFlight* other = in_register(&flight(1));
  for (;;) {
    if (turn->end > limit) {
      wake_ = turn->end;
      return true;
    }
    ++num_changes_;
    if (may_jump(limit, async ? *other : *turn) && jump(limit)) continue;
    deliver(*turn);
    if (clock_ >= limit || !scheduler_.has_requests() || has_told()) {
      first_flight_ ^= 1;
      --num_flights_;
      waiting_for_batch_ = false;
      return false;
    }
    take_inputs();
    bool evicts = false;
    if (scheduler_.schedule(turn->batch, async ? &other->batch : nullptr, preempted_, failed_)) {
      launch(*turn);
      evicts = !preempted_.empty() || !failed_.empty();
      if (evicts) tell_evictions();
    } else {
      launch_decodes(*turn);
    }
    const bool changed = evicts || !turn->batch.empty();
    if (async) {
      first_flight_ ^= 1;
      std::swap(turn, other);
    }
    if (!changed) {
      note_stall();
      return false;
    }
    if (has_told()) return false;
  }
}

[[gnu::flatten]] Engine::Told Engine::work(Picoseconds limit, bool until_told) {
  const std::size_t told = events_.size();
  wake_ = 0;
  if (in_pass_) {
    end_iteration();
    if (until_told && events_.size() != told) return Told::by_pass;
  }
  for (;;) {
    if (in_full_row()) {
      if (run_full_row(limit, until_told)) return Told::nothing;
      if (until_told && events_.size() != told) return waiting_for_batch_ ? Told::by_pass : Told::by_results;
    }
    const bool results = waiting_for_batch_;
    if (results) {
      if (flight(0).end > limit) {
        wake_ = flight(0).end;
        return Told::nothing;
      }
      ++num_changes_;
      process_results();
    } else {
      if (!start_iteration(limit)) {
        if (idle()) wake_ = std::max(clock_, next_input()) + 1;
        return Told::nothing;
      }
      ++num_changes_;
      iterate();
    }
    if (until_told && events_.size() != told) return results ? Told::by_results : Told::by_pass;
  }
}

Picoseconds Engine::next_event() const {
  Engine ahead = *this;
  ahead.events_.clear();
  Picoseconds first = kNever;
  // A step handed over ahead of time, or a cancellation during a step, may be told of after a later event.
  while (ahead.work(first, true) != Told::nothing) {
    for (const Event& event : ahead.events_) first = std::min(first, event.at);
    ahead.events_.clear();
  }
  return first;
}

Picoseconds Engine::next_end() const {
  static thread_local std::optional<Engine> scratch;  // asked for at every arrival: its memory is used again
  Engine& ahead = scratch ? *scratch = *this : scratch.emplace(*this);
  ahead.events_.clear();
  for (;;) {
    const Told told = ahead.work(kNever, true);
    if (told == Told::nothing) return kNever;
    const auto is_end = [](const Event& event) { return event.kind >= EventKind::finished; };
    if (std::any_of(ahead.events_.begin(), ahead.events_.end(), is_end)) {
      // A pass at t is made when time has moved beyond t.
      return told == Told::by_results ? ahead.clock_ : ahead.clock_ + 1;
    }
    ahead.events_.clear();
  }
}

Picoseconds Engine::run_to_first_token(std::int64_t id) {
  std::size_t seen = events_.size();
  while (work(kNever, true) != Told::nothing) {
    for (; seen < events_.size(); ++seen) {
      const Event& event = events_[seen];
      if (event.id != id) continue;
      if (event.kind == EventKind::first_token) return event.at;
      if (event.kind == EventKind::failed) return kNever;
    }
  }
  return kNever;
}

}  // namespace simcluster
