#include "cluster.hpp"

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <utility>

namespace simcluster {
namespace {

constexpr int kOwnTokensBit = 36;  // token ids of shared prefixes stay below 2**36, a request's own are above
constexpr int kMostSteps = 8;  // two calls a step
constexpr std::uint64_t kNotTaken = std::numeric_limits<std::uint64_t>::max();

Cluster::RowStatus status_of(EventKind kind) {
  if (kind == EventKind::finished) return Cluster::RowStatus::finished;
  return kind == EventKind::rejected ? Cluster::RowStatus::rejected : Cluster::RowStatus::failed;
}

}  // namespace

void NativePort::take_events(std::vector<Event>& events) {
  events.insert(events.end(), engine_.events().begin(), engine_.events().end());
  engine_.events().clear();
}

EnginePort::Load NativePort::load() const {
  const Scheduler& s = engine_.scheduler();
  const PrefixStats& prefix = s.prefix_stats();
  return {s.num_running(),       static_cast<std::int64_t>(s.waiting().size()),
          s.num_free_blocks(),   s.num_preemptions(),
          engine_.num_steps(),   engine_.busy_time(),
          prefix.queries,        prefix.hits,
          prefix.preempted_queries, prefix.preempted_hits};
}

Cluster::Cluster(const Requests& requests, bool in_order, Watch watch)
    : requests_(requests), in_order_(in_order), watch_(watch) {
  const std::size_t n = requests.max_tokens.size();
  const std::size_t values = n * requests.num_groups;
  const bool fits = requests.prompt_tokens.size() == values && requests.output_tokens.size() == values &&
                    requests.predicted_output.size() == values && requests.priority.size() == n &&
                    requests.cancel_after.size() == n && requests.ends_by_length.size() == n &&
                    (requests.prefix_offsets.empty() || requests.prefix_offsets.size() == n + 1);
  if (!fits) throw std::invalid_argument("the columns of the requests differ in length");
  if (!in_order) place_of_.assign(n, -1);
}

Cluster::~Cluster() {
  for (std::size_t j = 0; j < engines_.size(); ++j) finish_looks(j);
}

void Cluster::add_instance(std::unique_ptr<EnginePort> engine, const Place& place) {
  if (place.group >= requests_.num_groups) throw std::invalid_argument("an instance names a group that is not there");
  next_change_.push_back(engine->next_change());
  changes_.push_back(engine->num_changes());
  next_end_.push_back(next_change_.back());
  knows_end_.push_back(false);
  has_looks_.push_back(0);
  newest_.emplace_back();
  newest_changes_.push_back(kNotTaken);
  engines_.push_back(std::move(engine));
  places_.push_back(place);
}

std::size_t Cluster::add_router(std::vector<InstanceView*> views) {
  const std::size_t count = engines_.size();
  if (views.size() != count) throw std::invalid_argument("a router needs one view per instance");
  Seen seen;
  seen.views = std::move(views);
  routers_.push_back(std::move(seen));
  return routers_.size() - 1;
}

// ---- engines

void Cluster::settle(std::size_t instance, Picoseconds t) {
  EnginePort& engine = *engines_[instance];
  events_.clear();
  engine.take_events(events_);
  for (const Event& event : events_) record(instance, event);
  next_change_[instance] = engine.next_change();
  changes_[instance] = engine.num_changes();
  if (!knows_end_[instance]) next_end_[instance] = std::max(next_change_[instance], t < kNever ? t + 1 : t);
}

void Cluster::advance_one(std::size_t instance, Picoseconds t) {
  engines_[instance]->advance_to(t);
  if (next_end_[instance] <= t) knows_end_[instance] = false;  // else nothing has come that could move it
  settle(instance, t);
}

void Cluster::advance_all(Picoseconds t, std::size_t refreshed) {
  now_ = std::max(now_, t);
  for (std::size_t j = 0; j < engines_.size(); ++j) {
    if (next_change_[j] > t) continue;
    finish_looks(j, refreshed);
    advance_one(j, t);
  }
}

void Cluster::advance_to_ends(Picoseconds t) {
  now_ = std::max(now_, t);
  for (std::size_t j = 0; j < engines_.size(); ++j) {
    if (next_end_[j] > t) continue;
    finish_looks(j);
    advance_one(j, t);
  }
}

// To step the engine that is first in line costs less than to run a copy of it ahead, unless its end is many steps off.
Picoseconds Cluster::next_end(Picoseconds horizon) {
  if (engines_.empty()) return kNever;
  for (int steps = 0;; ++steps) {
    const auto first = static_cast<std::size_t>(std::ranges::min_element(next_end_) - next_end_.begin());
    const Picoseconds at = next_end_[first];
    if (knows_end_[first] || at > horizon || at >= kNever) return std::min(at, kNever);
    if (steps < kMostSteps) {
      const std::int64_t open = num_open_;
      const Picoseconds until = std::max(at, now_);
      finish_looks(first);
      advance_one(first, until);
      if (num_open_ != open) return until;
    } else {
      next_end_[first] = engines_[first]->next_end();
      knows_end_[first] = true;
    }
  }
}

// ---- what routers see

void Cluster::refresh(std::size_t router, Picoseconds t) {
  Seen& seen = routers_.at(router);
  advance_all(t, router);
  for (std::size_t j = 0; j < engines_.size(); ++j) {
    InstanceView& view = *seen.views[j];
    // A step that runs longer than believed ends later with every look at it.
    if (view.shows(changes_[j], t)) continue;
    const auto ahead = engines_[j]->ahead(view.believed(), places_[j].async);
    if (!ahead) {
      view.refresh(take(j, t), changes_[j]);
      continue;
    }
    view.refresh_later(*this, j, changes_[j], t, *ahead);
    has_looks_[j] = 1;
  }
}

std::shared_ptr<const Snapshot> Cluster::take(std::size_t instance, Picoseconds taken_at) {
  std::shared_ptr<Snapshot>& newest = newest_[instance];
  const bool same = newest_changes_[instance] == changes_[instance];
  if (same && newest->taken_at == taken_at) return newest;
  if (same) {  // a view compares what it has with what it gets
    newest = std::make_shared<Snapshot>(*newest);
  } else {
    if (!newest || newest.use_count() > 1) newest = std::make_shared<Snapshot>();
    engines_[instance]->snapshot_into(*newest);
    newest_changes_[instance] = changes_[instance];
  }
  newest->taken_at = taken_at;
  return newest;
}

void Cluster::finish_looks(std::size_t instance, std::size_t but) {
  if (has_looks_[instance] == 0) return;
  has_looks_[instance] = 0;
  const InstanceView* none = but == kNobody ? nullptr : routers_[but].views[instance];
  for (const Seen& seen : routers_) {
    if (seen.views[instance] != none) seen.views[instance]->look();
  }
}

std::vector<std::shared_ptr<const Snapshot>> Cluster::shown(std::size_t router) {
  const Seen& seen = routers_.at(router);
  std::vector<std::shared_ptr<const Snapshot>> snapshots;
  for (InstanceView* view : seen.views) snapshots.push_back(view->shown());
  return snapshots;
}

std::vector<std::shared_ptr<const Snapshot>> Cluster::capture(Picoseconds t) {
  advance(t);
  std::vector<std::shared_ptr<const Snapshot>> snapshots;
  snapshots.reserve(engines_.size());
  for (const auto& engine : engines_) {
    auto snapshot = std::make_shared<Snapshot>(engine->snapshot());
    snapshot->taken_at = t;
    snapshots.push_back(std::move(snapshot));
  }
  return snapshots;
}

void Cluster::show(std::size_t router, const std::vector<std::shared_ptr<const Snapshot>>& snapshots) {
  Seen& seen = routers_.at(router);
  if (snapshots.size() != seen.views.size()) throw std::invalid_argument("one snapshot per instance is needed");
  for (std::size_t j = 0; j < snapshots.size(); ++j) seen.views[j]->refresh(snapshots[j]);
}

// ---- requests

Picoseconds Cluster::engine_arrival(std::size_t instance, Picoseconds sent, std::int64_t prompt_tokens) const {
  const Place& place = places_[instance];
  const double delay = place.request_s + place.per_prompt_token_s * static_cast<double>(prompt_tokens);
  return sent + picoseconds_from_seconds(delay);
}

// A prompt spelt out as runs of token ids: equal hashes give equal tokens, the rest is the request's own.
std::vector<TokenRun> Cluster::prompt_runs(std::int64_t request, std::int64_t prompt_tokens) const {
  const auto i = static_cast<std::size_t>(request);
  const std::int64_t block = requests_.prefix_block;
  std::vector<TokenRun> runs;
  std::int64_t left = prompt_tokens;
  for (auto k = requests_.prefix_offsets[i]; k < requests_.prefix_offsets[i + 1] && left > 0; ++k) {
    const std::int64_t count = std::min(block, left);
    runs.push_back({static_cast<std::uint64_t>(requests_.prefix_values[static_cast<std::size_t>(k)] * block), count});
    left -= count;
  }
  if (left > 0) runs.push_back({static_cast<std::uint64_t>(request + 1) << kOwnTokensBit, left});
  return runs;
}

void Cluster::dispatch(std::int64_t request, std::size_t instance, Picoseconds now, Picoseconds sent,
                       std::size_t router) {
  if (instance >= engines_.size()) throw std::invalid_argument("there is no such instance");
  const auto i = static_cast<std::size_t>(request);
  finish_looks(instance);
  engines_[instance]->advance_to(now);
  new_row(request, now).instance = static_cast<std::int32_t>(instance);
  ++num_open_;

  Submission s;
  s.id = request;
  s.prompt_tokens = value(requests_.prompt_tokens, request, instance);
  s.output_tokens = value(requests_.output_tokens, request, instance);
  s.at = engine_arrival(instance, sent, s.prompt_tokens);
  s.max_tokens = requests_.max_tokens[i];
  s.ends_by_length = requests_.ends_by_length[i];
  s.priority = requests_.priority[i];
  s.arrival_time = now;
  if (places_[instance].shares_prefixes) s.prompt = prompt_runs(request, s.prompt_tokens);
  const bool accepted = engines_[instance]->submit(s);
  const Picoseconds patience = requests_.cancel_after[i];
  if (accepted && patience >= 0) engines_[instance]->cancel(request, now + patience);
  if (next_end_[instance] > s.at) knows_end_[instance] = false;  // an earlier end does not know of the request
  settle(instance, now);

  if (router != kNobody) {
    routers_.at(router).views[instance]->record_dispatch(
        {request, s.prompt_tokens, value(requests_.predicted_output, request, instance), s.max_tokens,
         requests_.routers_know_ends && s.ends_by_length, s.priority, s.arrival_time, s.at});
  }
}

void Cluster::turn_away(std::int64_t request, Picoseconds now) {
  Row& row = new_row(request, now);
  row.end = now;
  row.status = RowStatus::rejected;
  row.reason = Reason::shed;
}

Cluster::Row& Cluster::new_row(std::int64_t request, Picoseconds now) {
  if (request < 0 || static_cast<std::size_t>(request) >= requests_.max_tokens.size()) {
    throw std::invalid_argument("there is no such request");
  }
  if (in_order_ ? request != num_sent() : place_of_[static_cast<std::size_t>(request)] >= 0) {
    throw std::invalid_argument("a request is sent twice or out of order");
  }
  now_ = std::max(now_, now);
  if (!in_order_) place_of_[static_cast<std::size_t>(request)] = static_cast<std::int32_t>(num_sent());
  Row& row = rows_.emplace_back();
  row.request = request;
  row.arrival = now;
  return row;
}

Cluster::Row* Cluster::find(std::int64_t request) {
  const std::int64_t number = in_order_ ? request : place_of_[static_cast<std::size_t>(request)];
  return number < base_ ? nullptr : &rows_[static_cast<std::size_t>(number - base_)];
}

void Cluster::record(std::size_t instance, const Event& event) {
  Row* row = find(event.id);
  if (row == nullptr) return;
  const Picoseconds hop = event.reason == EndReason::abort ? 0 : places_[instance].output_hop;  // the client itself
  switch (event.kind) {
    case EventKind::scheduled:
      row->scheduled = event.at;
      row->cached_tokens = static_cast<std::int32_t>(event.value);
      return;
    case EventKind::preempted:
      ++row->preemptions;
      return;
    case EventKind::token:
      return;
    case EventKind::first_token:
      row->first_token = event.at + hop;
      if (watch_ == Watch::first_tokens_and_ends) notices_.push_back({event.id, event.kind, row->first_token});
      return;
    case EventKind::finished:
    case EventKind::rejected:
    case EventKind::failed:
      row->end = event.at + hop;
      row->output_tokens = static_cast<std::int32_t>(event.value);
      row->status = status_of(event.kind);
      row->reason = static_cast<Reason>(event.reason);
      --num_open_;
      if (watch_ != Watch::nothing) notices_.push_back({event.id, event.kind, row->end});
  }
}

// ---- records

std::size_t Cluster::num_ready(std::size_t least) {
  while (num_ended_ < rows_.size() && rows_[num_ended_].status != RowStatus::unfinished &&
         rows_[num_ended_].end <= now_) {
    ++num_ended_;
  }
  if (num_ended_ < least) return 0;
  if (in_order_) return least;
  std::size_t count = std::max<std::size_t>(least, 1);
  const auto same = [&](std::size_t k) {
    return (k < rows_.size() ? rows_[k].arrival : now_) == rows_[k - 1].arrival;
  };
  while (count <= num_ended_ && same(count)) ++count;
  return count <= num_ended_ ? count : 0;
}

std::vector<Cluster::Row> Cluster::take_rows(std::size_t count) {
  count = std::min(count, rows_.size());
  const auto last = rows_.begin() + static_cast<std::ptrdiff_t>(count);
  std::vector<Row> taken(rows_.begin(), last);
  for (Row& row : taken) seal(row, kNever);
  rows_.erase(rows_.begin(), last);
  base_ += static_cast<std::int64_t>(count);
  num_ended_ -= std::min(num_ended_, count);
  return taken;
}

void Cluster::seal(Row& row, Picoseconds limit) {
  if (row.end > limit) {
    row.status = RowStatus::unfinished;
    row.reason = Reason::in_transit;
    row.end = kDidNotCome;
  }
  const Picoseconds last = row.end == kDidNotCome ? limit : row.end;
  if (row.scheduled > last) row.scheduled = kDidNotCome;  // the asynchronous loop plans a step ahead
  if (row.first_token > last) {
    row.first_token = kDidNotCome;
    row.output_tokens = 0;
  }
}

void Cluster::finish(Picoseconds clock, bool cut) {
  for (const auto& engine : engines_) {
    const Snapshot snapshot = engine->snapshot();
    for (std::size_t k = 0; k < snapshot.requests.size(); ++k) {
      Row* row = find(snapshot.requests[k].id);
      if (row == nullptr) continue;
      row->output_tokens = static_cast<std::int32_t>(snapshot.requests[k].num_output_tokens);
      row->reason = static_cast<std::int64_t>(k) < snapshot.num_running ? Reason::running : Reason::waiting;
    }
  }
  for (Row& row : rows_) {
    if (row.status == RowStatus::unfinished && row.reason == Reason::none) row.reason = Reason::in_transit;
    seal(row, cut ? clock : kNever);
  }
  num_ended_ = rows_.size();
}

}  // namespace simcluster
