#include "view.hpp"

#include <algorithm>
#include <limits>
#include <tuple>
#include <utility>

#include "prefetch.hpp"

namespace simcluster {
namespace {

constexpr std::int64_t kMostInFlight = 3;  // batches, that to come included

SchedulerConfig counting(SchedulerConfig config) {
  config.enable_prefix_caching = false;
  config.track_blocks = false;
  return config;
}

Submission submission_of(const Dispatch& d) {
  Submission s;
  s.id = d.id;
  s.prompt_tokens = d.prompt_tokens;
  s.output_tokens = d.predicted_output;
  s.max_tokens = d.max_tokens;
  s.ends_by_length = d.ends_by_length;
  s.priority = d.priority;
  s.arrival_time = d.arrival_time;
  s.at = d.at;
  return s;
}

// Whether both show one state, with the step in flight on time by the believed model if the earlier one was.
bool same_state(const Snapshot& a, const Snapshot& b, const StepTimeModel& model, bool async) {
  const auto scalars = [](const Snapshot& s) {
    return std::tuple(s.version, s.boundary, s.intake, s.waiting_for_batch, s.unflushed_ends, s.capacity_bound,
                      s.num_executed, s.last_prefill, s.num_free_blocks, s.num_running, s.requests.size(),
                      s.left_out.num_running, s.left_out.num_waiting, s.left_out.prefill_tokens);
  };
  if (scalars(a) != scalars(b) || a.in_flight != b.in_flight) return false;
  if (!a.in_flight.empty() && a.taken_at != b.taken_at) {
    const Snapshot::BatchInFlight& batch = a.in_flight.front();
    if (batch.features.num_tokens == 0) return false;
    const Picoseconds end = batch.start + model.period(model.device_time(batch.features), async);
    if (std::max(a.taken_at, b.taken_at) > end) return false;
  }
  return a.requests == b.requests && a.details == b.details;
}

}  // namespace

InstanceView::InstanceView(SchedulerConfig config, const StepTimeModel& believed, std::int64_t mean_output,
                           bool overlay)
    : config_(counting(config)),
      mean_output_(mean_output),
      overlay_(overlay),
      least_(believed, config),
      engine_(config_, believed) {
  snapshot_ = std::make_shared<const Snapshot>(Snapshot::capture(engine_));
  set_bound(snapshot_->device_free(believed, config_.async_scheduling));
}

void InstanceView::unwatch(const ViewWatcher* watcher) {
  std::erase_if(watchers_, [&](const Watch& w) { return w.watcher == watcher; });
}

std::int64_t InstanceView::num_waiting() {
  look();
  const auto resident = static_cast<std::int64_t>(snapshot_->requests.size());
  return resident - snapshot_->num_running + snapshot_->left_out.num_waiting + (overlay_ ? num_dispatched_since() : 0);
}

void InstanceView::refresh(std::shared_ptr<const Snapshot> snapshot, std::uint64_t change) {
  source_ = nullptr;
  published_.words = nullptr;
  change_ = change;
  const bool async = config_.async_scheduling;
  const bool same =
      (ready_ || told_) && !ends_change_ && same_state(*snapshot_, *snapshot, engine_.step_time(), async);
  snapshot_ = std::move(snapshot);
  match_requests();
  has_ending_ = false;
  if (same) return;
  ready_ = foreseen_ = false;
  forget_outlook();
}

void InstanceView::refresh_later(SnapshotSource& source, std::size_t instance, std::uint64_t change,
                                 Picoseconds taken_at, const Ahead& ahead) {
  change_ = change;
  believed_until_ = -1;
  published_.words = nullptr;
  source_ = &source;
  source_instance_ = instance;
  source_taken_at_ = taken_at;
  ready_ = foreseen_ = false;
  ahead_ = ahead;
  set_bound(ahead.device_free);
  if (has_ending_ && least_.known) tighten_bound(ahead);
  tell();
}

void InstanceView::fetch() {
  snapshot_ = nullptr;  // its memory may be used again
  snapshot_ = source_->take(source_instance_, source_taken_at_);
  source_ = nullptr;
  match_requests();
  ahead_of_ending_ = ahead_;
  has_ending_ = true;
}

// Sort the own requests by whether the snapshot knows them, forget those that have ended, and put the expected ends
// beside the snapshot's requests. Nearly all of both come by ascending id.
void InstanceView::match_requests() {
  const auto by_id = [](const Own& a, const Own& b) { return a.id < b.id; };
  known_ids_.clear();
  const bool by_id_alone = snapshot_->intake < 0 && !unseen_.empty();
  if (by_id_alone) {
    for (const RequestState& r : snapshot_->requests) known_ids_.push_back(r.id);
    std::sort(known_ids_.begin(), known_ids_.end());
  }
  const auto arrived = [&](const Dispatch& d) {
    return by_id_alone ? std::binary_search(known_ids_.begin(), known_ids_.end(), d.id) : d.at <= snapshot_->intake;
  };
  bool sorted = true;
  for (const Dispatch& d : unseen_) {
    if (!arrived(d)) continue;
    sorted = sorted && (seen_.empty() || seen_.back().id < d.id);
    seen_.push_back({d.id, end_of(d)});
  }
  std::erase_if(unseen_, arrived);
  if (!sorted) std::sort(seen_.begin(), seen_.end(), by_id);
  was_shown_ = true;
  ends_change_ = false;
  believed_until_ = believed_until(*snapshot_);
  ending_.fill({});
  // Plain pointers, since every estimate from a new snapshot begins here.
  const std::size_t count = snapshot_->requests.size();
  ends_.resize(count);
  still_seen_.resize(std::min(count, seen_.size()));
  const RequestState* const known = snapshot_->requests.data();
  ExpectedEnd* const ends = ends_.data();
  const auto expect = [&](std::size_t i, const ExpectedEnd& end) {
    const RequestState& r = known[i];
    ends[i] = end;
    std::int64_t left = end.output_tokens - r.num_output_tokens;
    if (r.max_tokens > 0) left = std::min<std::int64_t>(left, r.max_tokens - r.num_output_tokens);
    if (left >= kMostTokens) return;
    EndingSoon& ending = ending_[static_cast<std::size_t>(std::max<std::int64_t>(left, 0))];
    ending.num_requests += 1;
    ending.num_tokens += r.num_tokens();
  };
  const Own* next = seen_.data();
  const Own* const last = next + seen_.size();
  Own* kept = still_seen_.data();
  std::int64_t before = std::numeric_limits<std::int64_t>::min();
  bool ascending = true;
  for (std::size_t i = 0; i < count; ++i) {
    const std::int64_t id = known[i].id;
    if (next == last || next->id != id) {
      next = std::lower_bound(static_cast<const Own*>(seen_.data()), last, Own{id, {}}, by_id);
      if (next == last || next->id != id) {
        expect(i, {mean_output_, false});
        continue;
      }
    }
    ascending = ascending && before < id;
    before = id;
    expect(i, next->end);
    *kept++ = *next++;
  }
  still_seen_.resize(static_cast<std::size_t>(kept - still_seen_.data()));
  if (snapshot_->left_out.num_resident() > 0) return;  // whoever is not there may be among those
  if (!ascending) std::sort(still_seen_.begin(), still_seen_.end(), by_id);
  seen_.swap(still_seen_);
}

// The device is busy with the batches in flight before it can take another.
void InstanceView::set_bound(Picoseconds device_free) {
  outlook_ = {};
  told_ = false;
  if (!least_.known) return;
  outlook_.at_least = outlook_.at_least_hinged = outlook_.at_least_later = device_free + least_.batch;
}

// Of the decodes that the instance tells of, those are left out that may be expected to end by then: in the last
// snapshot or taken since. Own requests on their way are computed before any later one.
void InstanceView::tighten_bound(const Ahead& ahead) {
  if (!engine_.stops_in_passes()) return;
  const StepTimeModel& model = believed();
  const std::int64_t tokens = ahead.num_batches - ahead_of_ending_.num_batches + kMostInFlight;
  std::int64_t decodes = ahead.num_decodes, context = ahead.decode_context;
  std::int64_t unknown = ahead.num_taken - ahead_of_ending_.num_taken;
  const auto leave_out = [&](std::int64_t requests, std::int64_t of_tokens) {
    decodes -= requests;
    context -= of_tokens + requests * tokens;
  };
  if (tokens < kMostTokens) {
    for (std::int64_t left = 0; left <= tokens; ++left) {
      const EndingSoon& ending = ending_[static_cast<std::size_t>(left)];
      leave_out(ending.num_requests, ending.num_tokens);
    }
  } else {
    decodes = 0;
  }
  Picoseconds prefills = 0;
  std::int64_t to_come = 0;
  for (const Dispatch& d : unseen_) {
    if (d.prompt_tokens < 1 || refuses(d.prompt_tokens, d.max_tokens)) continue;
    if (d.at <= ahead.intake) {
      leave_out(1, d.prompt_tokens);
      --unknown;
    } else if (overlay_ && d.prompt_tokens <= least_.budget) {
      to_come += d.prompt_tokens;
      prefills += least_.prompt(d.prompt_tokens);
      outlook_.earliest = std::max(outlook_.earliest, d.at);
    }
  }
  decodes = std::max<std::int64_t>(decodes - std::max<std::int64_t>(unknown, 0), 0);
  context = unknown > 0 || decodes == 0 ? 0 : std::max<std::int64_t>(context, 0);
  StepFeatures least;
  least.num_tokens = least.num_decodes = decodes;
  least.sum_decode_context = context;
  const Picoseconds decoding = decodes == 0 ? 0 : model.device_time(least) - model.b0;
  const std::int64_t beyond = std::max<std::int64_t>(decodes + to_come - std::max(least_.hinge, decodes), 0);
  outlook_.at_least += decoding + prefills + least_.beyond * beyond;
  least.num_tokens += to_come;
  outlook_.at_least_hinged = outlook_.at_least + least_.by_tokens(least);
  outlook_.at_least_later = outlook_.at_least;
}

void InstanceView::forget_outlook() {
  set_bound(snapshot_->device_free(engine_.step_time(), config_.async_scheduling));
  tell();
}

// The step in flight may run so long, or has already run longer.
Picoseconds InstanceView::believed_until(const Snapshot& snapshot) const {
  if (snapshot.in_flight.empty()) return kNever;
  const Snapshot::BatchInFlight& batch = snapshot.in_flight.front();
  const StepTimeModel& model = engine_.step_time();
  const Picoseconds time =
      batch.features.num_tokens == 0 ? 0 : model.period(model.device_time(batch.features), config_.async_scheduling);
  return std::max(snapshot.taken_at, batch.start + time);
}

void InstanceView::record_dispatch(const Dispatch& dispatch) {
  look();
  unseen_.push_back(dispatch);
  if (!overlay_) return;
  if (told_) forget_outlook();
  if (!ready_) return;
  ready_ = dispatch.prompt_tokens > 0 && dispatch.predicted_output > 0 && frontier_->add(submission_of(dispatch));
  tell();
}

void InstanceView::forget_dispatch(std::int64_t id) {
  look();
  const auto is_it = [id](const auto& known) { return known.id == id; };
  ends_change_ = std::erase_if(seen_, is_it) != 0 || ends_change_;
  if (std::erase_if(unseen_, is_it) == 0 || !overlay_) return;
  ready_ = false;
  forget_outlook();  // which may rest on it
}

// As the engine takes it: an explicit max_tokens is where a request without an EOS ends.
ExpectedEnd InstanceView::end_of(const Dispatch& d) {
  return {d.ends_by_length && d.max_tokens > 0 ? d.max_tokens : d.predicted_output, d.ends_by_length};
}

std::int64_t InstanceView::prefill_tokens_left() {
  look();
  std::int64_t left = snapshot_->left_out.prefill_tokens;
  for (const RequestState& r : snapshot_->requests) left += r.prefill_left();
  if (overlay_) {
    for (const Dispatch& d : unseen_) left += d.prompt_tokens;
  }
  return left;
}

std::int64_t InstanceView::decode_tokens_left() {
  look();
  std::int64_t left = snapshot_->left_out.num_resident() * mean_output_;
  const auto add = [&](std::int64_t expected, std::int64_t limit, std::int64_t delivered) {
    const std::int64_t last = std::max(expected, delivered + 1);
    left += std::max<std::int64_t>((limit > 0 ? std::min(last, limit) : last) - delivered, 0);
  };
  for (std::size_t i = 0; i < ends_.size(); ++i) {
    const RequestState& r = snapshot_->requests[i];
    add(ends_[i].output_tokens, r.max_tokens, r.num_output_tokens);
  }
  if (overlay_) {
    for (const Dispatch& d : unseen_) add(end_of(d).output_tokens, d.max_tokens, 0);
  }
  return left;
}

double InstanceView::kv_usage() {
  look();
  const auto usable = static_cast<double>(engine_.scheduler().config().num_usable_blocks());
  return 1.0 - static_cast<double>(snapshot_->num_free_blocks) / usable;
}

void InstanceView::restore(Engine& engine) {
  look();
  snapshot_->restore(engine, ends_);
  if (overlay_) {
    for (const Dispatch& d : unseen_) engine.submit(submission_of(d));
  }
}

void InstanceView::build_frontier() {
  if (!frontier_) frontier_ = std::make_unique<Frontier>(engine_);
  restore(frontier_->engine());
  frontier_->start();
  ready_ = true;
}

// Most views are asked once and then refreshed: that is answered without an engine where it can be.
std::optional<Picoseconds> InstanceView::foresee(const Submission& candidate) {
  static thread_local Forecast scratch;
  Forecast& forecast = *in_register(&scratch);
  foreseen_ = true;
  forecast.start(config_, engine_.step_time(), least_, *snapshot_, ends_);
  if (overlay_) {
    for (const Dispatch& d : unseen_) {
      if (d.prompt_tokens < 1 || d.predicted_output < 1) return std::nullopt;
      if (!engine_.refuses(d.prompt_tokens, d.max_tokens)) forecast.add(submission_of(d));
    }
  }
  const std::optional<Picoseconds> at = forecast.first_token(candidate);
  told_ = at && forecast.outlook() != nullptr;
  if (told_) outlook_ = *forecast.outlook();
  return at;
}

Picoseconds InstanceView::estimate_slowly(const Dispatch& candidate) {
  look();
  const bool late = candidate.at <= snapshot_->intake || candidate.prompt_tokens < 1 || candidate.predicted_output < 1;
  if (late || !engine_.stops_in_passes()) return simulate_first_token(candidate);
  if (engine_.refuses(candidate.prompt_tokens, candidate.max_tokens)) return kNever;
  const Submission submission = submission_of(candidate);
  const bool first = !ready_ && !foreseen_;
  if (first) {
    if (const std::optional<Picoseconds> at = foresee(submission)) {
      tell();
      return *at;
    }
  }
  if (!ready_) build_frontier();
  Picoseconds at = 0;
  if (!frontier_->reach(candidate.at)) {
    at = simulate_first_token(candidate);
  } else if (outlook().tells(candidate.prompt_tokens, candidate.at)) {
    at = outlook().first_token(believed(), config_.async_scheduling, {believed(), candidate.prompt_tokens}, candidate.at);
  } else if (first) {
    at = frontier_->run_out(submission);
    ready_ = false;
  } else {
    at = frontier_->run_on(submission, engine_);
  }
  tell();
  return at;
}

Picoseconds InstanceView::simulate_first_token(const Dispatch& candidate, bool fast) {
  if (!fast) {
    Engine stepping(config_, engine_.step_time(), {}, EngineOptions{false, false, false});
    return simulate_on(stepping, candidate);
  }
  return simulate_on(engine_, candidate);
}

Picoseconds InstanceView::simulate_on(Engine& engine, const Dispatch& candidate) {
  restore(engine);
  if (!engine.submit(submission_of(candidate))) return kNever;
  try {
    return engine.run_to_first_token(candidate.id);
  } catch (const LivelockError&) {
    return kNever;
  }
}

}  // namespace simcluster
