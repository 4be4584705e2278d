#include "snapshot.hpp"

#include <algorithm>
#include <stdexcept>
#include <utility>

namespace simcluster {
namespace {

Picoseconds free_after(const StepFeatures& batch, Picoseconds start, Picoseconds free, const StepTimeModel& believed,
                       bool async) {
  if (batch.num_tokens == 0) return free;
  return std::max(free, start + believed.period(believed.device_time(batch), async));
}

void expect(RequestState& r, const ExpectedEnd& end) {
  const std::int32_t output = end.output_of(r);
  if (end.by_length) {
    r.max_tokens = std::min(output, r.max_tokens);
  } else {
    r.eos_at = output;
  }
}

}  // namespace

Snapshot Snapshot::capture(const Engine& engine) {
  Snapshot shot;
  capture(engine, shot);
  return shot;
}

void Snapshot::capture(const Engine& engine, Snapshot& shot) {
  const Scheduler& s = engine.scheduler_;
  shot.version = kVersion;
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
  shot.left_out = {};

  const std::size_t resident = static_cast<std::size_t>(s.num_running_) + s.waiting_.size();
  shot.requests.clear();
  shot.details.clear();
  shot.requests.reserve(resident);
  shot.details.reserve(resident);
  static thread_local std::vector<std::int32_t> index_of_slot;  // scratch
  index_of_slot.assign(s.slots_.size(), -1);
  std::int32_t* const index_of = index_of_slot.data();
  // Those with a decode in flight from before they joined, and how many decodes they have had since.
  std::vector<std::pair<std::int32_t, std::int32_t>> joined_again;
  const auto publish = [&](std::int32_t slot) {
    index_of[slot] = static_cast<std::int32_t>(shot.requests.size());
    RequestState& r = shot.requests.emplace_back(s.request(slot));
    const RequestDetail& d = shot.details.emplace_back(s.detail(slot));
    if (r.lockstep) {
      const std::int32_t sampled = r.num_sampled_tokens;
      s.settle(r);
      r.excluded = false;  // restoring finds out
      const std::int64_t join = std::max<std::int64_t>(-Scheduler::passes_since_join(r, s.results_), -1);
      r.join_pass = static_cast<std::uint32_t>(join);
      const std::int32_t decodes = r.num_sampled_tokens - sampled;
      r.lockstep = join < 0 || decodes_in_flight(r) == decodes;
      if (!r.lockstep) joined_again.push_back({index_of[slot], decodes});
    }
    r.max_tokens = d.visible_max_tokens;  // the true end stays hidden
    r.eos_at = 0;
  };
  for (std::int32_t slot = s.first_running_; slot >= 0; slot = s.request(slot).next_running) publish(slot);
  for (const std::int32_t slot : s.waiting_) publish(slot);

  shot.in_flight.resize(engine.num_flights_);
  for (std::size_t i = 0; i < engine.num_flights_; ++i) {
    const Engine::InFlight& flight = engine.flight(i);
    BatchInFlight& batch = shot.in_flight[i];
    batch.entries.clear();
    batch.start = flight.start;
    batch.features = flight.batch.features;
    batch.num_lockstep = flight.batch.num_lockstep;
    for (const BatchEntry& entry : flight.batch.entries) {
      const bool here = s.request(entry.slot).id == entry.id;
      batch.entries.push_back({here ? index_of[entry.slot] : -1, entry.num_tokens,
                               entry.sample_index});
    }
  }
  for (const auto& [request, decodes] : joined_again) {
    const RequestState& r = shot.requests[static_cast<std::size_t>(request)];
    for (std::int32_t i = 1; i <= decodes; ++i) {
      BatchInFlight& batch = shot.in_flight[r.join_pass + static_cast<std::size_t>(i)];
      batch.entries.push_back({request, 1, r.num_sampled_tokens - decodes + i - 1});
      batch.num_lockstep -= 1;
    }
  }
  const bool folded = !s.lockstep_ || !joined_again.empty();
  if (folded) shot.fold_decodes();
  shot.in_step.count = folded ? -1 : s.group_.size;
  shot.in_step.context = s.group_.sum_context;
  shot.in_step.by_phase = s.group_.by_phase;
  if (!folded) {
    const auto ahead = std::ssize(shot.in_flight) % s.config_.block_size;
    const auto first = (s.phase_ - ahead + s.config_.block_size) % s.config_.block_size;
    std::rotate(shot.in_step.by_phase.begin(), shot.in_step.by_phase.begin() + first, shot.in_step.by_phase.end());
  }
}

Picoseconds Snapshot::device_free(const StepTimeModel& believed, bool async) const {
  Picoseconds free = boundary;
  for (const BatchInFlight& batch : in_flight) {
    free = free_after(batch.features, &batch == &in_flight.front() ? batch.start : free, free, believed, async);
  }
  return free;
}

Ahead Snapshot::ahead(const Engine& engine, const StepTimeModel& believed, bool async) {
  Ahead ahead;
  Picoseconds free = engine.clock_;
  for (std::size_t i = 0; i < engine.num_flights_; ++i) {
    const Engine::InFlight& flight = engine.flight(i);
    free = free_after(flight.batch.features, i == 0 ? flight.start : free, free, believed, async);
  }
  ahead.device_free = free;
  ahead.intake = engine.intake_;
  ahead.num_batches = engine.num_steps_;
  const Scheduler& s = engine.scheduler_;
  const auto blocks = [&] { return s.group_.by_phase[static_cast<std::size_t>(s.phase_)] + s.group_.num_excluded; };
  if (s.lockstep_ && blocks() < s.num_free_blocks()) {  // else one of them may be preempted
    ahead.num_decodes = s.group_.size;
    ahead.decode_context = s.group_.sum_context;
  }
  return ahead;
}

// What the batches in flight hold of one request.
struct Snapshot::Fold {
  std::int32_t join = -1;        // the batch of its first sample; -1: none of them
  std::int32_t num_decodes = 0;  // entries after that
  bool regular = true;           // one sampled token in every batch from its first entry on, but for earlier chunks

  void add(std::int32_t batch, const Entry& entry, const RequestState& r) {
    if (entry.sample_index < 0) {
      regular = regular && num_decodes == 0 && join < 0;
      return;
    }
    const bool first = join < 0 && num_decodes == 0;
    if (first && (r.num_output_tokens == 0 || entry.num_tokens > 1)) {
      join = batch;
    } else {
      regular = regular && entry.num_tokens == 1 && batch == join + 1 + num_decodes;
      ++num_decodes;
    }
  }
  // Whether the counters are what the rules of lockstep give.
  bool fits(const RequestState& r) const {
    const std::int32_t in_flight = num_decodes + (join >= 0 ? 1 : 0);
    return regular && r.status == Status::running && r.num_stale_tokens == 0 &&
           r.num_sampled_tokens == r.num_output_tokens + in_flight && (join >= 0 || r.num_output_tokens > 0) &&
           (join >= 0 || r.num_inflight_tokens == num_decodes) &&
           r.num_computed_tokens == r.num_tokens() + num_decodes - (join >= 0 ? 0 : 1) &&
           (r.num_output_placeholders == in_flight || r.num_output_placeholders == 0);
  }
};

void Snapshot::fold_decodes() {
  std::vector<Fold> folds(static_cast<std::size_t>(num_running));
  const auto running = [&](const Entry& e) { return e.request >= 0 && e.request < num_running; };
  for (std::size_t b = 0; b < in_flight.size(); ++b) {
    for (const Entry& entry : in_flight[b].entries) {
      if (!running(entry)) continue;
      const auto i = static_cast<std::size_t>(entry.request);
      folds[i].add(static_cast<std::int32_t>(b), entry, requests[i]);
    }
  }
  for (std::size_t i = 0; i < folds.size(); ++i) {
    RequestState& r = requests[i];
    if (r.lockstep || !folds[i].fits(r)) continue;
    r.lockstep = true;
    r.join_pass = static_cast<std::uint32_t>(folds[i].join);
  }
  for (std::size_t b = 0; b < in_flight.size(); ++b) {
    BatchInFlight& batch = in_flight[b];
    batch.num_lockstep += static_cast<std::int64_t>(std::erase_if(batch.entries, [&](const Entry& entry) {
      if (!running(entry) || !requests[static_cast<std::size_t>(entry.request)].lockstep) return false;
      const std::int32_t join = folds[static_cast<std::size_t>(entry.request)].join;
      return entry.sample_index >= 0 && static_cast<std::int32_t>(b) != join;
    }));
  }
}

// Puts a request back in lockstep: from the fields as they are now to those as of the pass it joined in.
void Snapshot::rewind(RequestState& r, bool async) {
  const std::int32_t decodes = decodes_in_flight(r);
  r.num_sampled_tokens -= decodes;
  r.num_computed_tokens -= decodes;
  r.num_inflight_tokens -= decodes;
  r.num_output_tokens -= static_cast<std::int32_t>(r.join_pass) < 0 ? 1 : 0;
  r.num_output_placeholders = async ? 1 : 0;
  r.is_prefill_chunk = false;
}

void Snapshot::restore_running(Engine& engine, const std::vector<ExpectedEnd>& ends) const {
  Scheduler& s = engine.scheduler_;
  const auto count = static_cast<std::int32_t>(num_running);
  Rejoin rejoin(s.config_, s.pass_);
  // Plain pointers and sums in registers: this loop is most of what restoring costs.
  const RequestState* const known = requests.data();
  const ExpectedEnd* const end = ends.data();
  RequestState* const states = s.slots_.data();
  std::int32_t* const by_phase = s.group_.by_phase.data();
  const bool together = s.lockstep_;
  std::int64_t size = 0, sum_context = 0;
  for (std::int32_t slot = 0; slot < count; ++slot) {
    RequestState& r = states[slot];
    r = known[slot];
    expect(r, end[slot]);
    r.prev_running = slot - 1;
    r.next_running = slot + 1;
    if (!r.lockstep) continue;
    if (together && rejoin(r, Ending::of(r.max_tokens, r.eos_at, r.num_prompt_tokens, rejoin.max_model_len))) {
      rewind(r, rejoin.async);
      size += 1;
      sum_context += rejoin.context;
      by_phase[rejoin.block_phase] += 1;
      s.group_.ends.add(rejoin.last_pass, slot);
    } else {
      visit_again(engine, slot);
    }
  }
  s.group_.size += size;
  s.group_.sum_context += sum_context;
  if (count > 0) s.state(count - 1).next_running = -1;
  s.first_running_ = count > 0 ? 0 : -1;
  s.last_running_ = count - 1;
  s.num_running_ = count;
  s.sequence_ = count > 0 ? details[static_cast<std::size_t>(count) - 1].sequence + 1 : 0;
}

// Out of lockstep: its decodes in flight get entries.
void Snapshot::visit_again(Engine& engine, std::int32_t slot) {
  RequestState& r = engine.scheduler_.state(slot);
  const auto join = static_cast<std::int32_t>(r.join_pass);
  const std::int32_t decodes = decodes_in_flight(r);
  for (std::int32_t i = 1; i <= decodes; ++i) {
    Batch& batch = engine.flight(static_cast<std::size_t>(join + i)).batch;
    batch.entries.emplace_back(r.id, slot, r.num_computed_tokens - decodes + i - 1, 1,
                               r.num_sampled_tokens - decodes + i - 1, true, false);
    batch.num_lockstep -= 1;
  }
  r.lockstep = false;
}

Picoseconds Snapshot::end_in_flight(std::size_t i, Picoseconds before, const StepTimeModel& believed,
                                    bool async) const {
  const BatchInFlight& batch = in_flight[i];
  Picoseconds end = i == 0 ? batch.start : before;
  if (batch.features.num_tokens > 0) end += believed.period(believed.device_time(batch.features), async);
  return i == 0 ? std::max(end, taken_at) : end;
}

void Snapshot::restore_batches(Engine& engine, const std::vector<ExpectedEnd>& ends) const {
  engine.first_flight_ = 0;
  engine.num_flights_ = in_flight.size();
  for (std::size_t i = 0; i < in_flight.size(); ++i) {
    Batch& batch = engine.flight(i).batch;
    batch.entries.clear();
    batch.features = in_flight[i].features;
    batch.num_lockstep = in_flight[i].num_lockstep;
    batch.pass = static_cast<std::int64_t>(i);
  }
  restore_running(engine, ends);
  Picoseconds last = boundary;
  for (std::size_t i = 0; i < in_flight.size(); ++i) {
    Engine::InFlight& flight = engine.flight(i);
    for (const Entry& e : in_flight[i].entries) {
      if (e.request < 0) continue;
      flight.batch.entries.emplace_back(requests[static_cast<std::size_t>(e.request)].id, e.request, 0, e.num_tokens,
                                        e.sample_index, false, false);
    }
    flight.start = i == 0 ? in_flight[i].start : last;
    flight.end = last = end_in_flight(i, last, engine.step_time_, engine.async_);
  }
  engine.device_free_ = last;
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
  s.slots_.resize(requests.size());
  s.details_.assign(details.begin(), details.end());
  s.free_slots_.clear();
  s.pass_ = static_cast<std::int64_t>(in_flight.size());
  s.phase_ = s.pass_ % s.config_.block_size;
  s.results_ = 0;
  s.unflushed_ends_ = unflushed_ends;
  s.capacity_bound_ = capacity_bound;
  s.num_executed_ = num_executed;
  s.last_prefill_ = last_prefill;
  s.kv_.set_num_free_blocks(num_free_blocks);
  restore_batches(engine, ends);
  s.waiting_.clear();
  for (auto i = static_cast<std::size_t>(num_running); i < requests.size(); ++i) {
    s.slots_[i] = requests[i];
    expect(s.slots_[i], ends[i]);
    s.waiting_.push_back(static_cast<std::int32_t>(i));
  }

  engine.inbox_.clear();
  engine.cancels_.clear();
  engine.events_.clear();
  engine.wake_ = 0;
  engine.now_ = std::max<Picoseconds>(intake, 0);
  engine.clock_ = boundary;
  engine.intake_ = intake;
  engine.waiting_for_batch_ = waiting_for_batch;
  engine.stalled_ = false;
  engine.in_pass_ = false;
  engine.last_input_ = -1;
  engine.iterations_without_token_ = 0;
  engine.livelock_limit_ = Engine::kLeastLivelockLimit;
}

}  // namespace simcluster
