#include "view.hpp"

#include <algorithm>
#include <utility>

namespace simcluster {
namespace {

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

// Known tokens without a processed result. A decoding request misses only its newest token.
std::int64_t prefill_left(const RequestState& r) {
  const std::int64_t processed = r.num_computed_tokens - (r.num_inflight_tokens - r.num_stale_tokens);
  const std::int64_t missing = r.num_tokens() - processed;
  return r.num_output_tokens > 0 && missing <= 1 ? 0 : missing;
}

}  // namespace

InstanceView::InstanceView(SchedulerConfig config, const StepTimeModel& believed, std::int64_t mean_output,
                           bool overlay)
    : mean_output_(mean_output), overlay_(overlay), engine_(counting(config), believed) {
  snapshot_ = std::make_shared<const Snapshot>(Snapshot::capture(engine_));
}

std::int64_t InstanceView::num_waiting() const {
  const auto resident = static_cast<std::int64_t>(snapshot_->requests.size());
  return resident - snapshot_->num_running + (overlay_ ? num_dispatched_since() : 0);
}

void InstanceView::refresh(std::shared_ptr<const Snapshot> snapshot) {
  snapshot_ = std::move(snapshot);
  const auto arrived = [&](const Dispatch& d) { return d.at <= snapshot_->intake; };
  for (const Dispatch& d : unseen_) {
    if (arrived(d)) seen_.push_back(d);
  }
  std::erase_if(unseen_, arrived);
  // Forget what has ended: keep only ids that the snapshot still holds.
  std::vector<std::int64_t> resident;
  resident.reserve(snapshot_->requests.size());
  for (const RequestState& r : snapshot_->requests) resident.push_back(r.id);
  std::sort(resident.begin(), resident.end());
  std::erase_if(seen_, [&](const Dispatch& d) {
    return !std::binary_search(resident.begin(), resident.end(), d.id);
  });
  std::sort(seen_.begin(), seen_.end(), [](const Dispatch& a, const Dispatch& b) { return a.id < b.id; });
}

void InstanceView::record_dispatch(const Dispatch& dispatch) { unseen_.push_back(dispatch); }

ExpectedEnd InstanceView::expected_end(std::int64_t id) const {
  const auto it = std::lower_bound(seen_.begin(), seen_.end(), id,
                                   [](const Dispatch& d, std::int64_t wanted) { return d.id < wanted; });
  if (it == seen_.end() || it->id != id) return {mean_output_, false};
  return end_of(*it);
}

// As the engine takes it: an explicit max_tokens is where a request without an EOS ends.
ExpectedEnd InstanceView::end_of(const Dispatch& d) {
  return {d.ends_by_length && d.max_tokens > 0 ? d.max_tokens : d.predicted_output, d.ends_by_length};
}

std::int64_t InstanceView::prefill_tokens_left() const {
  std::int64_t left = 0;
  for (const RequestState& r : snapshot_->requests) left += prefill_left(r);
  if (overlay_) {
    for (const Dispatch& d : unseen_) left += d.prompt_tokens;
  }
  return left;
}

std::int64_t InstanceView::decode_tokens_left() const {
  std::int64_t left = 0;
  const auto add = [&](std::int64_t expected, std::int64_t limit, std::int64_t delivered) {
    const std::int64_t last = std::max(expected, delivered + 1);
    left += std::max<std::int64_t>((limit > 0 ? std::min(last, limit) : last) - delivered, 0);
  };
  for (const RequestState& r : snapshot_->requests) {
    add(expected_end(r.id).output_tokens, r.max_tokens, r.num_output_tokens);
  }
  if (overlay_) {
    for (const Dispatch& d : unseen_) add(end_of(d).output_tokens, d.max_tokens, 0);
  }
  return left;
}

double InstanceView::kv_usage() const {
  const auto usable = static_cast<double>(engine_.scheduler().config().num_usable_blocks());
  return 1.0 - static_cast<double>(snapshot_->num_free_blocks) / usable;
}

Picoseconds InstanceView::estimate_first_token(const Dispatch& candidate) {
  ends_.clear();
  for (const RequestState& r : snapshot_->requests) ends_.push_back(expected_end(r.id));
  snapshot_->restore(engine_, ends_);
  if (overlay_) {
    for (const Dispatch& d : unseen_) engine_.submit(submission_of(d));
  }
  if (!engine_.submit(submission_of(candidate))) return kNever;
  try {
    return engine_.run_to_first_token(candidate.id);
  } catch (const LivelockError&) {
    return kNever;
  }
}

}  // namespace simcluster
