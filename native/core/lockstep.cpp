// Decodes in lockstep: how a pass and its results treat them without visiting them. See scheduler.hpp.
//
// A request that samples in pass j with c tokens computed is a decode of every later pass p with c + p - j - 1 tokens
// before it, and of none after the pass that samples its last token; except that the asynchronous loop, which does
// not know an EOS yet, schedules it once more.
#include <algorithm>

#include "pass.hpp"

namespace simcluster {

void Scheduler::use_lockstep() {
  const bool cadence = config_.prefill_schedule_interval > 1 && config_.vllm_version != VllmVersion::v0_32;
  lockstep_ = config_.policy == Policy::fcfs && config_.long_prefill_token_threshold == 0 && !cadence &&
              !kv_.exact();
  if (!lockstep_) return;
  group_.by_phase.assign(static_cast<std::size_t>(config_.block_size), 0);
  forget_lockstep();
}

void Scheduler::join(const BatchEntry& entry) {
  RequestState& r = state(entry.slot);
  r.join_pass = static_cast<std::uint32_t>(pass_);
  const std::int64_t left = decodes_left(r);
  if (left < 0) return;  // its end is in flight
  r.lockstep = true;
  r.excluded = false;
  count_decode(r.num_computed_tokens, phase_ + 1, r.num_blocks * config_.block_size - r.num_computed_tokens);
  group_.ends.add(pass_ + left, entry.slot);
}

void Scheduler::exclude(RequestState& r) {
  const std::int64_t context = r.num_computed_tokens + passes_since_join(r, pass_) - 1;
  const auto beyond = static_cast<std::int64_t>(static_cast<std::uint32_t>(context) %
                                                static_cast<std::uint32_t>(config_.block_size));
  group_.size -= 1;
  group_.sum_context -= context;
  group_.by_phase[phase_after(phase_, beyond == 0 ? 0 : config_.block_size - beyond)] -= 1;
  group_.num_excluded += 1;
  r.excluded = true;
}

void Scheduler::leave(RequestState& r) {
  if (!r.excluded) exclude(r);
  group_.num_excluded -= 1;
  settle(r);
}

void Scheduler::settle(RequestState& r) const {
  const bool async = config_.async_scheduling, known = known_end(r);
  const std::int64_t left = (known ? limit_of(r) : r.eos_at) - r.num_sampled_tokens;
  const std::int64_t scheduled = left + (async && !known ? 1 : 0);
  const std::int64_t results = passes_since_join(r, results_ - 1);
  const std::int64_t decodes = std::min(passes_since_join(r, pass_ - 1), scheduled);
  const std::int64_t delivered = std::max<std::int64_t>(std::min(results, left) + 1, 0);
  r.num_computed_tokens += narrow(decodes);
  r.num_sampled_tokens += narrow(decodes);
  r.num_output_tokens += narrow(delivered);
  // Once the pass it joined in is processed, only decodes are in flight.
  const std::int64_t before = results < 0 ? r.num_inflight_tokens : -std::min(results, scheduled);
  r.num_inflight_tokens = narrow(before + decodes);
  if (async) r.num_output_placeholders = static_cast<std::int8_t>(r.num_output_placeholders + decodes - delivered);
  if (config_.enable_prefix_caching && (decodes > 0 || !async)) {
    r.num_registered_tokens = r.num_computed_tokens - (async ? 1 : 0);
  }
  r.num_blocks = narrow(config_.blocks_for(r.num_computed_tokens));
  r.lockstep = false;
}

RequestState Scheduler::settled(std::int32_t slot) const {
  RequestState r = request(slot);
  if (r.lockstep) settle(r);
  return r;
}

std::vector<BatchEntry> Scheduler::lockstep_entries(const Batch& batch) const {
  std::vector<BatchEntry> entries;
  if (batch.num_lockstep == 0) return entries;
  for (std::int32_t slot = first_running_; slot >= 0; slot = request(slot).next_running) {
    const RequestState& r = request(slot);
    if (!r.lockstep || !is_decode_of(r, batch.pass)) continue;
    const std::int64_t decodes = passes_since_join(r, batch.pass);
    entries.push_back({r.id, slot, narrow(r.num_computed_tokens + decodes - 1), 1,
                       narrow(r.num_sampled_tokens - 1 + decodes), true, false});
  }
  return entries;
}

void Scheduler::spell_out(Batch& batch) const {
  if (batch.num_lockstep == 0) return;
  std::vector<BatchEntry> entries = lockstep_entries(batch);
  entries.insert(entries.end(), batch.entries.begin(), batch.entries.end());
  batch.entries = std::move(entries);
  batch.num_lockstep = 0;
}

// Back to visiting everybody: spell out the batch in flight and every request.
void Scheduler::settle_all(Batch* in_flight) {
  if (in_flight != nullptr) spell_out(*in_flight);
  for (std::int32_t slot = first_running_; slot >= 0; slot = request(slot).next_running) {
    if (request(slot).lockstep) settle(state(slot));
  }
  forget_lockstep();
}

void Scheduler::forget_lockstep() {
  group_.size = group_.num_excluded = group_.sum_context = 0;
  std::fill(group_.by_phase.begin(), group_.by_phase.end(), 0);
  group_.ends.clear();
  group_.ending.clear();
}

// Of a request that leaves before its end.
void Scheduler::forget_end(std::int32_t slot) {
  if (group_.ends.remove(slot)) return;
  std::erase_if(group_.ending, [slot](End end) { return slot_of(end) == slot; });
}

// Asynchronous loop: set apart those whose last token is in flight; where that is known no pass schedules them.
[[gnu::flatten]] void Scheduler::collect_ending() {
  while (next_end() < pass_) {
    const std::int64_t pass = next_end();
    group_.ends.take([&](std::int32_t slot) {
      RequestState& r = state(slot);
      if (known_end(r)) exclude(r);
      group_.ending.push_back(end_at(pass, slot));
    });
  }
}

std::int32_t Scheduler::partial_prefill() const {
  if (last_running_ < 0) return -1;
  const RequestState& r = request(last_running_);
  return !r.lockstep && r.is_prefill_chunk ? last_running_ : -1;
}

// The last of the running is evicted; its decode in flight gets an entry, behind those that go on without one.
void Scheduler::evict_last(Batch* in_flight, std::vector<Outcome>& preempted) {
  const std::int32_t slot = last_running_;
  RequestState& r = state(slot);
  if (r.lockstep) {
    if (in_flight != nullptr && is_decode_of(r, in_flight->pass)) {
      const auto decodes = narrow(passes_since_join(r, in_flight->pass));
      in_flight->entries.insert(in_flight->entries.begin(), {r.id, slot, r.num_computed_tokens + decodes - 1, 1,
                                                             r.num_sampled_tokens - 1 + decodes, true, false});
      in_flight->num_lockstep -= 1;
    }
    leave(r);
    forget_end(slot);
  }
  preempted.push_back({r.id, r.num_output_tokens});
  preempt(slot);
}

// Blocks for the decodes of a pass, in order; whoever is last gives way as soon as there are none. Those evicted are the
// fewest without whom the rest have their blocks.
void Scheduler::take_for_decodes(Batch* in_flight, std::vector<Outcome>& preempted) {
  const std::int32_t& needed = group_.by_phase[static_cast<std::size_t>(phase_)];
  for (std::int64_t taken = 0;;) {
    const std::int64_t more = std::min(kv_.num_free_counted(), needed - taken);
    kv_.take_counted(more);
    taken += more;
    if (taken == needed) return;
    evict_last(in_flight, preempted);
  }
}

void Scheduler::take_decodes(Batch& batch) {
  const std::int64_t decodes = group_.size;
  batch.num_lockstep = decodes;
  batch.features = {decodes, decodes, group_.sum_context, 0, 0};
  group_.sum_context += decodes;
}

bool Scheduler::schedule_decodes(Batch& batch) {
  if (next_end() < pass_ && config_.async_scheduling) collect_ending();
  const std::int64_t taken = group_.by_phase[static_cast<std::size_t>(phase_)];
  if (!waiting_.empty() || !all_in_lockstep(-1) || taken > kv_.num_free_counted()) return false;
  batch.entries.clear();
  batch.pass = pass_;
  kv_.take_counted(taken);
  take_decodes(batch);
  capacity_bound_ = false;
  count_pass(batch);
  return true;
}

bool Scheduler::schedule_lockstep(Pass& pass, Batch& batch, Batch* in_flight, std::vector<Outcome>& preempted) {
  if (next_end() < pass_ && config_.async_scheduling) collect_ending();
  std::int32_t partial = -1;
  if (!all_in_lockstep(-1)) {
    partial = partial_prefill();
    if (!all_in_lockstep(partial)) return false;
  }
  const std::int64_t taken = group_.by_phase[static_cast<std::size_t>(phase_)];
  if (taken <= kv_.num_free_counted()) {
    kv_.take_counted(taken);
  } else {
    take_for_decodes(in_flight, preempted);
    partial = -1;  // it was the first to go
  }
  take_decodes(batch);
  pass.budget -= batch.num_lockstep;
  if (partial < 0) return true;
  RequestState& r = state(partial);
  const std::int64_t chunk = std::min(r.num_tokens() - r.num_computed_tokens, pass.budget);
  if (kv_.allocate(partial, r, chunk, 0, false, 0)) {
    append(pass, batch, partial, chunk, false);
  } else {
    evict_last(in_flight, preempted);
  }
  return true;
}

// Results of decodes stand before those of entries, as in the batch.
[[gnu::flatten]] void Scheduler::finish_lockstep(const Batch& batch, std::vector<Outcome>& results) {
  std::vector<End>& ending = group_.ending;
  while (next_end() <= batch.pass) {
    const std::int64_t its = next_end();
    group_.ends.take([&](std::int32_t slot) { ending.push_back(end_at(its, slot)); });
  }
  std::size_t count = 0;
  while (count < ending.size() && pass_of(ending[count]) <= batch.pass) ++count;
  if (count > 1) sort_by_admission(count);
  bool joined = false;
  for (std::size_t i = 0; i < count; ++i) {
    const std::int32_t slot = slot_of(ending[i]);
    const bool has_entry = passes_since_join(request(slot), batch.pass) == 0;
    joined |= has_entry;
    if (!has_entry) results.push_back(finish(slot));
  }
  if (!batch.entries.empty()) update_entries(batch, results);
  for (std::size_t i = 0; joined && i < count; ++i) {
    const std::int32_t slot = slot_of(ending[i]);
    if (request(slot).id < 0 || passes_since_join(request(slot), batch.pass) != 0) continue;
    const Outcome outcome = finish(slot);
    const auto its = [&](const Outcome& o) { return o.id == outcome.id; };
    std::find_if(results.begin(), results.end(), its)->reason = outcome.reason;
  }
  if (count == ending.size()) {
    ending.clear();
  } else {
    ending.erase(ending.begin(), ending.begin() + static_cast<std::ptrdiff_t>(count));
  }
}

// The first of those whose last token is in flight: into the order of the batch.
void Scheduler::sort_by_admission(std::size_t count) {
  const auto last = group_.ending.begin() + static_cast<std::ptrdiff_t>(count);
  std::sort(group_.ending.begin(), last, [this](End a, End b) {
    return static_cast<std::int32_t>(detail(slot_of(a)).sequence - detail(slot_of(b)).sequence) < 0;
  });
}

Outcome Scheduler::finish(std::int32_t slot) {
  RequestState& r = state(slot);
  const bool known = known_end(r);
  const std::int64_t last = known ? limit_of(r) : r.eos_at;
  const Outcome outcome{r.id, last, r.eos_at == last ? EndReason::stop : EndReason::length};
  if (kv_.forgets_hashes()) {  // then all that settling would tell is the number of its blocks
    if (!r.excluded) exclude(r);
    group_.num_excluded -= 1;
    const std::int64_t scheduled = last - r.num_sampled_tokens + (config_.async_scheduling && !known ? 1 : 0);
    const std::int64_t decodes = std::min(passes_since_join(r, pass_ - 1), scheduled);
    r.num_blocks = narrow(config_.blocks_for(r.num_computed_tokens + decodes));
  } else {
    leave(r);
    if (config_.enable_prefix_caching) {
      r.num_registered_tokens = std::max(r.num_registered_tokens, r.num_computed_tokens - r.num_inflight_tokens);
    }
  }
  erase_running(slot);
  close_slot(slot);
  return outcome;
}

// -- stretches of passes that change counters alone

SteadyState Scheduler::steady_state(std::size_t depth) {
  SteadyState steady;
  if (!lockstep_ || group_.size == 0 || !group_.ending.empty()) return steady;
  const auto ahead = static_cast<std::int64_t>(depth);
  const std::int32_t partial = partial_prefill();
  if (pass_ - results_ != ahead || !all_in_lockstep(partial)) return steady;
  steady.num_decodes = group_.size;
  steady.decode_context = group_.sum_context;
  const std::int64_t budget = config_.max_num_batched_tokens - group_.size;
  // No result may end a request, and no pass may find one whose last token is in flight.
  std::int64_t passes = next_end() - results_ - (ahead - 1);
  if (partial >= 0) {
    const RequestState& r = request(partial);
    const std::int64_t left = r.num_tokens() - r.num_computed_tokens;
    steady.chunk = std::min(left, budget);
    steady.chunk_start = r.num_computed_tokens;
    if (steady.chunk < 2) return steady;  // a chunk of one token counts as a decode beyond the prompt
    passes = std::min(passes, (left - 1) / steady.chunk);
  } else if (can_admit(budget, group_.by_phase[static_cast<std::size_t>(phase_)])) {
    return steady;
  }
  steady.passes = passes > 0 ? affordable(steady, passes) : 0;
  return steady;
}

// Whether the next pass would take the head of the queue, or find that it can never fit.
bool Scheduler::can_admit(std::int64_t budget, std::int64_t taken) {
  if (waiting_.empty() || budget <= 0 || seats_left() <= 0) return false;
  const std::int32_t slot = waiting_.front();
  const RequestState& r = request(slot);
  if (config_.blocks_for(std::min(r.num_tokens(), config_.max_model_len)) > config_.num_usable_blocks()) return true;
  const std::int64_t hits = kv_.find_hits(slot, r);
  const std::int64_t tokens = r.num_tokens() - hits * config_.block_size;
  if (!config_.enable_chunked_prefill && tokens > budget) return false;
  return kv_.admissible(r, std::min(tokens, budget), hits, watermark(), taken);
}

// Blocks that so many passes take.
std::int64_t Scheduler::blocks_needed(const SteadyState& steady, std::int64_t passes) const {
  const std::int64_t rounds = passes / config_.block_size;
  std::int64_t needed = rounds * steady.num_decodes;
  for (std::int64_t i = rounds * config_.block_size; i < passes; ++i) {
    needed += group_.by_phase[static_cast<std::size_t>((phase_ + i) % config_.block_size)];
  }
  if (steady.chunk > 0) {
    needed += config_.blocks_for(steady.chunk_start + passes * steady.chunk) - config_.blocks_for(steady.chunk_start);
  }
  return needed;
}

// The most of these passes whose blocks are free.
std::int64_t Scheduler::affordable(const SteadyState& steady, std::int64_t passes) const {
  const std::int64_t free = kv_.num_free_blocks();
  const std::int64_t at_most = (passes / config_.block_size + 1) * steady.num_decodes +
                               config_.blocks_for(passes * steady.chunk) + 1;
  if (at_most <= free || blocks_needed(steady, passes) <= free) return passes;
  std::int64_t low = 0;
  while (passes - low > 1) {
    const std::int64_t middle = low + (passes - low) / 2;
    (blocks_needed(steady, middle) <= free ? low : passes) = middle;
  }
  return low;
}

void Scheduler::skip(const SteadyState& steady, std::int64_t passes, std::size_t depth) {
  kv_.take_counted(blocks_needed(steady, passes));
  group_.sum_context += passes * steady.num_decodes;
  if (steady.chunk > 0) {
    RequestState& r = state(partial_prefill());
    r.num_computed_tokens += narrow(passes * steady.chunk);
    r.num_inflight_tokens = narrow(static_cast<std::int64_t>(depth) * steady.chunk);
    r.num_blocks = narrow(config_.blocks_for(r.num_computed_tokens));
    if (config_.enable_prefix_caching) r.num_registered_tokens = r.num_computed_tokens;
  }
  advance_passes(passes);
  results_ += passes;
  num_executed_ += passes;
  capacity_bound_ = !waiting_.empty();
  unflushed_ends_ = false;
}

}  // namespace simcluster
