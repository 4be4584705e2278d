#include "snapshot.hpp"

#include <algorithm>
#include <stdexcept>

namespace simcluster {

Snapshot Snapshot::capture(const Engine& engine) {
  const Scheduler& s = engine.scheduler_;
  Snapshot shot;
  shot.taken_at = engine.now_;
  shot.boundary = engine.clock_;
  shot.intake = engine.intake_;
  shot.waiting_for_batch = engine.waiting_for_batch_;
  shot.unflushed_ends = s.unflushed_ends_;
  shot.capacity_bound = s.capacity_bound_;
  shot.num_executed = s.num_executed_;
  shot.last_prefill = s.last_prefill_;
  shot.num_free_blocks = s.num_free_blocks();
  shot.num_running = s.num_running_;

  std::vector<std::int32_t> index_of_slot(s.slots_.size(), -1);
  shot.requests.reserve(static_cast<std::size_t>(s.num_running_) + s.waiting_.size());
  const auto publish = [&](std::int32_t slot) {
    index_of_slot[static_cast<std::size_t>(slot)] = static_cast<std::int32_t>(shot.requests.size());
    RequestState r = s.settled(slot);
    r.max_tokens = 0;  // the true end stays hidden
    r.eos_at = 0;
    shot.requests.push_back(r);
  };
  for (const std::int32_t slot : s.running()) publish(slot);
  for (const std::int32_t slot : s.waiting_) publish(slot);

  for (std::size_t i = 0; i < engine.num_flights_; ++i) {
    const Engine::InFlight& flight = engine.flight(i);
    BatchInFlight batch;
    batch.start = flight.start;
    batch.features = flight.batch.features;
    const auto add = [&](const BatchEntry& entry) {
      const bool here = s.request(entry.slot).id == entry.id;
      batch.entries.push_back({here ? index_of_slot[static_cast<std::size_t>(entry.slot)] : -1,
                               entry.num_tokens, entry.sample_index});
    };
    for (const BatchEntry& entry : s.lockstep_entries(flight.batch)) add(entry);
    for (const BatchEntry& entry : flight.batch.entries) add(entry);
    shot.in_flight.push_back(std::move(batch));
  }
  return shot;
}

void Snapshot::restore(Engine& engine, const std::vector<ExpectedEnd>& ends) const {
  if (version != kVersion) throw std::invalid_argument("a snapshot of another layout version");
  if (ends.size() != requests.size()) {
    throw std::invalid_argument("as many expected ends are needed as the snapshot has requests");
  }
  Scheduler& s = engine.scheduler_;
  if (s.kv_.exact()) {
    throw std::invalid_argument(
        "a snapshot holds no block identities; restore it with enable_prefix_caching and track_blocks off");
  }
  if (s.lockstep_) s.forget_lockstep();
  s.slots_ = requests;
  s.free_slots_.clear();
  s.first_running_ = s.last_running_ = -1;
  s.num_running_ = 0;
  s.waiting_.clear();
  for (std::size_t i = 0; i < requests.size(); ++i) {
    RequestState& r = s.slots_[i];
    const std::int64_t last = std::max(ends[i].output_tokens, r.num_output_tokens + 1);
    r.max_tokens = ends[i].by_length ? std::min(last, r.visible_max_tokens) : r.visible_max_tokens;
    r.eos_at = ends[i].by_length ? 0 : last;
    const auto slot = static_cast<std::int32_t>(i);
    if (static_cast<std::int64_t>(i) < num_running) {
      s.push_running(slot);
    } else {
      s.waiting_.push_back(slot);
    }
  }
  s.unflushed_ends_ = unflushed_ends;
  s.capacity_bound_ = capacity_bound;
  s.num_executed_ = num_executed;
  s.last_prefill_ = last_prefill;
  s.kv_.set_num_free_blocks(num_free_blocks);
  s.pass_ = static_cast<std::int64_t>(in_flight.size());
  s.results_ = 0;

  engine.inbox_.clear();
  engine.cancels_.clear();
  engine.first_flight_ = engine.num_flights_ = 0;
  engine.events_.clear();
  engine.now_ = std::max<Picoseconds>(intake, 0);
  engine.clock_ = boundary;
  engine.intake_ = intake;
  engine.waiting_for_batch_ = waiting_for_batch;
  engine.stalled_ = false;
  engine.iterations_without_token_ = 0;
  engine.livelock_limit_ = 1000;
  engine.device_free_ = boundary;
  for (const BatchInFlight& batch : in_flight) {
    const bool first = engine.num_flights_ == 0;
    Engine::InFlight& flight = engine.flight(engine.num_flights_);
    flight.batch.features = batch.features;
    flight.batch.entries.clear();
    flight.batch.num_lockstep = 0;
    flight.batch.pass = static_cast<std::int64_t>(engine.num_flights_++);
    for (const Entry& entry : batch.entries) {
      if (entry.request < 0) continue;
      BatchEntry e;
      e.slot = entry.request;
      e.id = requests[static_cast<std::size_t>(entry.request)].id;
      e.num_tokens = entry.num_tokens;
      e.sample_index = entry.sample_index;
      flight.batch.entries.push_back(e);
    }
    const StepTimeModel& model = engine.step_time_;
    flight.start = first ? batch.start : engine.device_free_;
    flight.end = flight.start;
    if (batch.features.num_tokens > 0) {
      flight.end += model.period(model.device_time(batch.features), s.config_.async_scheduling);
    }
    // The step was still running when the snapshot was taken.
    if (first) flight.end = std::max(flight.end, taken_at);
    engine.device_free_ = flight.end;
  }
}

}  // namespace simcluster
