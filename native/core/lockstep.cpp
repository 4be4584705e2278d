// Decodes in lockstep: how a pass and its results treat them without visiting them. See scheduler.hpp.
//
// A request that samples in pass j with c tokens computed is a decode of every later pass p with c + p - j - 1 tokens
// before it, and of none after the pass that samples its last token; except that the asynchronous loop, which does
// not know an EOS yet, schedules it once more.
#include <algorithm>

#include "pass.hpp"

namespace simcluster {
namespace {

// Earliest end on top; at one pass in order of admission, which is batch order.
constexpr auto kLater = [](const auto& a, const auto& b) {
  return a.pass != b.pass ? a.pass > b.pass : a.sequence > b.sequence;
};

}  // namespace

void Scheduler::use_lockstep() {
  const bool cadence = config_.prefill_schedule_interval > 1 && config_.vllm_version != VllmVersion::v0_32;
  lockstep_ = config_.policy == Policy::fcfs && config_.long_prefill_token_threshold == 0 && !cadence &&
              !kv_.exact();
  if (lockstep_) group_.by_residue.assign(static_cast<std::size_t>(config_.block_size), 0);
}

bool Scheduler::live(const End& end) const {
  const RequestState& r = request(end.slot);
  return r.lockstep && r.sequence == end.sequence;
}

std::size_t Scheduler::residue(std::int64_t shift) const {
  const std::int64_t r = shift % config_.block_size;
  return static_cast<std::size_t>(r < 0 ? r + config_.block_size : r);
}

void Scheduler::join(const BatchEntry& entry) {
  RequestState& r = state(entry.slot);
  const std::int64_t limit = std::min(r.max_tokens, config_.max_model_len - r.num_prompt_tokens);
  const std::int64_t last = (r.eos_at > 0 ? std::min(r.eos_at, limit) : limit) - 1;
  if (entry.sample_index > last) return;  // its end is in flight
  r.lockstep = true;
  r.excluded = false;
  r.known_end = last + 1 == limit;
  r.join_pass = pass_;
  r.join_tokens = entry.num_tokens;
  r.last_pass = pass_ + last - entry.sample_index;
  group_.size += 1;
  group_.sum_context += r.num_computed_tokens;
  group_.by_residue[residue(r.num_computed_tokens - pass_ - 1)] += 1;
  group_.ends.push_back({r.last_pass, r.sequence, entry.slot});
  std::push_heap(group_.ends.begin(), group_.ends.end(), kLater);
}

void Scheduler::exclude(RequestState& r) {
  group_.size -= 1;
  group_.sum_context -= r.num_computed_tokens + pass_ - r.join_pass - 1;
  group_.by_residue[residue(r.num_computed_tokens - r.join_pass - 1)] -= 1;
  r.excluded = true;
}

std::int64_t Scheduler::delivered_since(const RequestState& r) const {
  return std::max<std::int64_t>(std::min(results_ - 1, r.last_pass) - r.join_pass + 1, 0);
}

void Scheduler::settle(RequestState& r) const {
  const bool async = config_.async_scheduling;
  const std::int64_t last_scheduled = r.last_pass + (async && !r.known_end ? 1 : 0);
  const std::int64_t decodes = std::min(pass_ - 1, last_scheduled) - r.join_pass;
  const std::int64_t processed = std::max<std::int64_t>(std::min(results_ - 1, last_scheduled) - r.join_pass + 1, 0);
  const std::int64_t delivered = delivered_since(r);
  r.num_computed_tokens += decodes;
  r.num_sampled_tokens += decodes;
  r.num_output_tokens += delivered;
  r.num_inflight_tokens += decodes - (processed > 0 ? r.join_tokens + processed - 1 : 0);
  if (async) r.num_output_placeholders += decodes - delivered;
  if (config_.enable_prefix_caching && (decodes > 0 || !async)) {
    r.num_registered_tokens = r.num_computed_tokens - (async ? 1 : 0);
  }
  r.num_blocks = config_.blocks_for(r.num_computed_tokens);
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
    const std::int64_t decodes = batch.pass - r.join_pass;
    const bool wasted = config_.async_scheduling && !r.known_end;
    if (!r.lockstep || decodes < 1 || batch.pass > r.last_pass + (wasted ? 1 : 0)) continue;
    BatchEntry entry;
    entry.slot = slot;
    entry.decode = true;
    entry.id = r.id;
    entry.start = r.num_computed_tokens + decodes - 1;
    entry.num_tokens = 1;
    entry.sample_index = r.num_sampled_tokens - 1 + decodes;
    entries.push_back(entry);
  }
  return entries;
}

// Back to visiting everybody: spell out the batch in flight and every request.
void Scheduler::settle_all(Batch* in_flight) {
  if (in_flight != nullptr && in_flight->num_lockstep > 0) {
    std::vector<BatchEntry> entries = lockstep_entries(*in_flight);
    entries.insert(entries.end(), in_flight->entries.begin(), in_flight->entries.end());
    in_flight->entries = std::move(entries);
    in_flight->num_lockstep = 0;
  }
  for (std::int32_t slot = first_running_; slot >= 0; slot = request(slot).next_running) {
    if (request(slot).lockstep) settle(state(slot));
  }
  forget_lockstep();
}

void Scheduler::forget_lockstep() {
  group_.size = 0;
  group_.sum_context = 0;
  std::fill(group_.by_residue.begin(), group_.by_residue.end(), 0);
  group_.ends.clear();
  group_.ending.clear();
}

void Scheduler::drop_stale_ends() {
  while (!group_.ends.empty() && !live(group_.ends.front())) {
    std::pop_heap(group_.ends.begin(), group_.ends.end(), kLater);
    group_.ends.pop_back();
  }
}

// Asynchronous loop: set apart those whose last token is in flight; where that is known no pass schedules them.
void Scheduler::collect_ending() {
  while (!group_.ends.empty() && group_.ends.front().pass < pass_) {
    const End end = group_.ends.front();
    std::pop_heap(group_.ends.begin(), group_.ends.end(), kLater);
    group_.ends.pop_back();
    if (!live(end)) continue;
    RequestState& r = state(end.slot);
    if (r.known_end) exclude(r);
    group_.ending.push_back(end);
  }
}

std::int32_t Scheduler::partial_prefill() const {
  if (last_running_ < 0) return -1;
  const RequestState& r = request(last_running_);
  return !r.lockstep && r.is_prefill_chunk ? last_running_ : -1;
}

bool Scheduler::all_in_lockstep(std::int32_t partial) const {
  std::int64_t apart = partial >= 0 ? 1 : 0;
  for (const End& end : group_.ending) apart += live(end) && request(end.slot).excluded ? 1 : 0;
  return group_.size + apart == num_running_;
}

bool Scheduler::schedule_lockstep(Pass& pass, Batch& batch) {
  if (config_.async_scheduling) collect_ending();
  const std::int32_t partial = partial_prefill();
  if (!all_in_lockstep(partial)) return false;
  const std::int64_t decodes = group_.size;
  std::int64_t needed = group_.by_residue[residue(-pass_)];
  std::int64_t chunk = 0;
  if (partial >= 0) {
    const RequestState& r = request(partial);
    chunk = std::min(r.num_tokens() - r.num_computed_tokens, pass.budget - decodes);
    needed += config_.blocks_for(r.num_computed_tokens + chunk) - r.num_blocks;
  }
  if (needed > kv_.num_free_blocks()) return false;

  kv_.take_counted(group_.by_residue[residue(-pass_)]);
  pass.budget -= decodes;
  batch.num_lockstep = decodes;
  batch.features.num_tokens = decodes;
  batch.features.num_decodes = decodes;
  batch.features.sum_decode_context = group_.sum_context;
  group_.sum_context += decodes;
  if (partial >= 0) {
    kv_.allocate(partial, state(partial), chunk, 0, false, 0);
    append(pass, batch, partial, chunk, false);
  }
  return true;
}

void Scheduler::finish_lockstep(std::int64_t pass, std::vector<Outcome>& results) {
  std::vector<End>& ending = group_.ending;
  while (!group_.ends.empty() && group_.ends.front().pass <= pass) {
    ending.push_back(group_.ends.front());
    std::pop_heap(group_.ends.begin(), group_.ends.end(), kLater);
    group_.ends.pop_back();
  }
  std::size_t num_before = 0;  // results of decodes stand before those of entries, as in the batch
  std::size_t kept = 0;
  for (const End& end : ending) {
    if (!live(end)) continue;
    if (end.pass > pass) {
      ending[kept++] = end;
      continue;
    }
    RequestState& r = state(end.slot);
    if (!r.excluded) exclude(r);
    const bool has_entry = r.join_pass == pass;
    settle(r);
    if (config_.enable_prefix_caching) {
      r.num_registered_tokens = std::max(r.num_registered_tokens, r.num_computed_tokens - r.num_inflight_tokens);
    }
    const Outcome outcome{r.id, r.num_output_tokens, end_reason(r)};
    if (has_entry) {
      std::find_if(results.begin(), results.end(), [&](const Outcome& o) { return o.id == r.id; })->reason =
          outcome.reason;
    } else {
      results.insert(results.begin() + static_cast<std::ptrdiff_t>(num_before++), outcome);
    }
    erase_running(end.slot);
    close_slot(end.slot);
  }
  ending.resize(kept);
}

// -- stretches of passes that change counters alone

SteadyState Scheduler::steady_state(std::size_t depth) {
  SteadyState steady;
  if (!lockstep_ || group_.size == 0 || !group_.ending.empty()) return steady;
  const auto ahead = static_cast<std::int64_t>(depth);
  const std::int32_t partial = partial_prefill();
  drop_stale_ends();
  if (pass_ - results_ != ahead || !all_in_lockstep(partial)) return steady;
  steady.num_decodes = group_.size;
  steady.decode_context = group_.sum_context;
  const std::int64_t budget = config_.max_num_batched_tokens - group_.size;
  // No result may end a request, and no pass may find one whose last token is in flight.
  std::int64_t passes = group_.ends.front().pass - results_ - (ahead - 1);
  if (partial >= 0) {
    const RequestState& r = request(partial);
    const std::int64_t left = r.num_tokens() - r.num_computed_tokens;
    steady.chunk = std::min(left, budget);
    steady.chunk_start = r.num_computed_tokens;
    if (steady.chunk < 2) return steady;  // a chunk of one token counts as a decode beyond the prompt
    passes = std::min(passes, (left - 1) / steady.chunk);
  } else if (can_admit(budget, group_.by_residue[residue(-pass_)])) {
    return steady;
  }
  steady.passes = passes > 0 ? affordable(steady, passes) : 0;
  return steady;
}

// Whether the next pass would take the head of the queue, or find that it can never fit.
bool Scheduler::can_admit(std::int64_t budget, std::int64_t taken) {
  const std::int64_t limit = config_.max_num_active_seqs > 0 ? config_.max_num_active_seqs : config_.max_num_seqs;
  if (waiting_.empty() || budget <= 0 || num_running_ >= limit) return false;
  const std::int32_t slot = waiting_.front();
  const RequestState& r = request(slot);
  if (config_.blocks_for(std::min(r.num_tokens(), config_.max_model_len)) > config_.num_usable_blocks()) return true;
  const std::int64_t hits = kv_.find_hits(slot, r);
  const std::int64_t tokens = r.num_tokens() - hits * config_.block_size;
  if (!config_.enable_chunked_prefill && tokens > budget) return false;
  return kv_.admissible(r, std::min(tokens, budget), hits, num_running_ == 0 ? 0 : watermark_blocks_, taken);
}

// Blocks that so many passes take.
std::int64_t Scheduler::blocks_needed(const SteadyState& steady, std::int64_t passes) const {
  const std::int64_t rounds = passes / config_.block_size;
  std::int64_t needed = rounds * steady.num_decodes;
  for (std::int64_t i = rounds * config_.block_size; i < passes; ++i) {
    needed += group_.by_residue[residue(-(pass_ + i))];
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
    r.num_computed_tokens += passes * steady.chunk;
    r.num_inflight_tokens = static_cast<std::int64_t>(depth) * steady.chunk;
    r.num_blocks = config_.blocks_for(r.num_computed_tokens);
    if (config_.enable_prefix_caching) r.num_registered_tokens = r.num_computed_tokens;
  }
  pass_ += passes;
  results_ += passes;
  num_executed_ += passes;
  capacity_bound_ = !waiting_.empty();
  unflushed_ends_ = false;
}

}  // namespace simcluster
