#include "scheduler.hpp"

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <utility>

#include "pass.hpp"
#include "prefetch.hpp"

namespace simcluster {
namespace {

constexpr std::int64_t kLargest = std::numeric_limits<std::int32_t>::max();

}  // namespace

Scheduler::Scheduler(const SchedulerConfig& config)
    : last_prefill_(-config.prefill_schedule_interval),
      watermark_blocks_(config.num_watermark_blocks()),
      config_(config),
      kv_(config) {}

bool Scheduler::before(std::int32_t a, std::int32_t b) const {
  const RequestDetail& x = detail(a);
  const RequestDetail& y = detail(b);
  if (x.priority != y.priority) return x.priority < y.priority;
  if (x.arrival_time != y.arrival_time) return x.arrival_time < y.arrival_time;
  return request(a).id < request(b).id;
}

std::vector<std::int32_t> Scheduler::running() const {
  std::vector<std::int32_t> slots;
  slots.reserve(static_cast<std::size_t>(num_running_));
  for (std::int32_t slot = first_running_; slot >= 0; slot = request(slot).next_running) slots.push_back(slot);
  return slots;
}

void Scheduler::check_prompt(std::span<const TokenRun> prompt, std::int64_t tokens) const {
  if (prompt.empty()) return;
  if (!covers(prompt, tokens)) {
    throw std::invalid_argument("the token runs of a prompt do not add up to its length");
  }
  if (!config_.shared_prefixes) {
    throw std::invalid_argument("a prompt has token runs although shared_prefixes is off");
  }
}

std::int32_t Scheduler::open(const RequestSpec& spec) {
  if (spec.num_prompt_tokens > kLargest) throw std::invalid_argument("a prompt is longer than any context");
  check_prompt(spec.prompt, spec.num_prompt_tokens);
  std::int32_t slot = 0;
  if (free_slots_.empty()) {
    if (slots_.size() >> kSlotBits != 0) throw std::length_error("too many requests in one engine");
    slot = static_cast<std::int32_t>(slots_.size());
    slots_.emplace_back();
    details_.emplace_back();
  } else {
    slot = free_slots_.back();
    free_slots_.pop_back();
  }
  RequestState& r = state(slot);
  r = RequestState{};
  r.id = spec.id;
  r.num_prompt_tokens = narrow(spec.num_prompt_tokens);
  r.max_tokens = narrow(std::min(spec.max_tokens, kLargest));
  r.eos_at = narrow(std::min(spec.eos_at, kLargest));  // no context is long enough to reach it
  r.status = Status::waiting;
  RequestDetail& d = edit_detail(slot);
  d = RequestDetail{};
  d.priority = spec.priority;
  d.arrival_time = spec.arrival_time;
  d.visible_max_tokens = narrow(std::min(spec.visible_max_tokens, kLargest));
  kv_.open(slot, spec);
  return slot;
}

void Scheduler::free_slot(std::int32_t slot) {
  RequestState& r = state(slot);
  r.status = Status::gone;
  r.id = -1;
  free_slots_.push_back(slot);
}

void Scheduler::close_slot(std::int32_t slot) {
  kv_.release(slot, state(slot), false);
  free_slot(slot);
  unflushed_ends_ = true;
}

void Scheduler::push_running(std::int32_t slot) {
  RequestState& r = state(slot);
  r.prev_running = last_running_;
  r.next_running = -1;
  edit_detail(slot).sequence = sequence_++;
  (last_running_ >= 0 ? state(last_running_).next_running : first_running_) = slot;
  last_running_ = slot;
  ++num_running_;
}

void Scheduler::erase_running(std::int32_t slot) {
  const RequestState& r = request(slot);
  (r.prev_running >= 0 ? state(r.prev_running).next_running : first_running_) = r.next_running;
  (r.next_running >= 0 ? state(r.next_running).prev_running : last_running_) = r.prev_running;
  --num_running_;
}

void Scheduler::push_waiting(std::int32_t slot, bool front) {
  if (config_.policy == Policy::priority) {
    const auto place = std::upper_bound(
        waiting_.begin(), waiting_.end(), slot,
        [this](std::int32_t a, std::int32_t b) { return before(a, b); });
    waiting_.insert(place, slot);
  } else if (front) {
    waiting_.push_front(slot);
  } else {
    waiting_.push_back(slot);
  }
}

std::int64_t Scheduler::abort(std::int64_t id) {
  for (std::int32_t slot = first_running_; slot >= 0; slot = request(slot).next_running) {
    RequestState& r = state(slot);
    if (r.id != id) continue;
    if (r.lockstep) {
      leave(r);
      forget_end(slot);
    }
    const std::int64_t delivered = r.num_output_tokens;
    erase_running(slot);
    close_slot(slot);
    return delivered;
  }
  const auto same = [&](std::int32_t slot) { return request(slot).id == id; };
  const auto it = std::find_if(waiting_.begin(), waiting_.end(), same);
  if (it == waiting_.end()) return -1;
  const std::int32_t slot = *it;
  waiting_.erase(it);
  const std::int64_t delivered = request(slot).num_output_tokens;
  close_slot(slot);
  return delivered;
}

void Scheduler::prefetch_contents() const {
  prefetch_bytes(group_.by_phase.data(), group_.by_phase.size() * sizeof(std::int32_t));
  prefetch_bytes(group_.ending.data(), sizeof(End));
  if (last_running_ >= 0) prefetch_bytes(&request(last_running_), sizeof(RequestState));
  if (free_slots_.empty()) return;
  prefetch_bytes(&request(free_slots_.back()), sizeof(RequestState));
  prefetch_bytes(&detail(free_slots_.back()), sizeof(RequestDetail));
}

void Scheduler::append(Pass& pass, Batch& batch, std::int32_t slot, std::int64_t tokens, bool first_admission) {
  RequestState& r = state(slot);
  const bool decode = tokens == 1 && r.num_computed_tokens >= r.num_prompt_tokens;
  batch.entries.emplace_back(r.id, slot, r.num_computed_tokens, narrow(tokens), -1, decode, first_admission);
  r.in_batch = true;
  pass.budget -= tokens;
}

// 2.2
void Scheduler::admit_waiting(Pass& pass, Batch& batch, std::vector<Outcome>& failed) {
  while (pass.budget > 0 && !waiting_.empty() && seats_left() > 0) {
    const std::int32_t slot = waiting_.front();
    RequestState& r = state(slot);
    if (config_.blocks_for(std::min(r.num_tokens(), config_.max_model_len)) > config_.num_usable_blocks()) {
      // It has outgrown the whole pool; the real engine would try for ever.
      failed.push_back({r.id, r.num_output_tokens, EndReason::kv_capacity});
      waiting_.pop_front();
      close_slot(slot);
      continue;
    }
    const std::int64_t hits = kv_.find_hits(slot, r);
    const std::int64_t hit_tokens = hits * config_.block_size;
    if (pass.hold && hit_tokens < r.num_tokens() - 1) break;
    std::int64_t n = r.num_tokens() - hit_tokens;
    if (pass.threshold > 0) n = std::min(n, pass.threshold);
    if (!config_.enable_chunked_prefill && n > pass.budget) break;
    n = std::min(n, pass.budget);
    if (!kv_.allocate(slot, r, n, hits, true, watermark())) break;
    waiting_.pop_front();
    push_running(slot);
    r.num_computed_tokens = narrow(hit_tokens);
    const std::int64_t looked_up = config_.enable_prefix_caching ? r.num_tokens() : 0;  // else vLLM counts nothing
    const bool first = r.status != Status::preempted;
    if (!first) {
      prefix_stats_.preempted_queries += looked_up;
      prefix_stats_.preempted_hits += hit_tokens;
    } else {
      prefix_stats_.queries += looked_up;
      prefix_stats_.hits += hit_tokens;
      edit_detail(slot).num_cached_tokens = narrow(hit_tokens);
    }
    r.status = Status::running;
    pass.did_prefill |= hit_tokens < r.num_tokens() - 1;
    append(pass, batch, slot, n, first);
  }
}

// 2.7
[[gnu::flatten]] void Scheduler::finish_entries(Batch& batch) {
  for (BatchEntry& entry : batch.entries) {
    RequestState& r = state(entry.slot);
    batch.features.add(entry.start, entry.num_tokens, entry.decode);
    r.in_batch = false;
    r.num_computed_tokens += entry.num_tokens;
    r.num_inflight_tokens += entry.num_tokens;
    r.is_prefill_chunk = r.num_computed_tokens < r.num_tokens() + r.num_output_placeholders;
    if (r.is_prefill_chunk) continue;
    entry.sample_index = r.num_sampled_tokens++;
    if (config_.async_scheduling) r.num_output_placeholders += 1;
    if (lockstep_) join(entry);
  }
}

void Scheduler::finish_pass(const Pass& pass, Batch& batch) {
  if (!batch.entries.empty()) finish_entries(batch);
  count_pass(batch);
  if (pass.interval > 1 && pass.did_prefill) last_prefill_ = num_executed_;
}

void Scheduler::count_pass(const Batch& batch) {
  if (!batch.empty()) ++num_executed_;
  unflushed_ends_ = false;
  ++pass_;
  if (++phase_ == config_.block_size) phase_ = 0;
}

// In lockstep form, where a pass has neither threshold nor cadence.
void Scheduler::start_pass(Pass& pass, Batch& batch, Batch* in_flight, std::vector<Outcome>& preempted,
                           std::vector<Outcome>& failed) {
  batch.entries.clear();
  batch.pass = pass_;
  pass.budget = config_.max_num_batched_tokens;
  if (!schedule_lockstep(pass, batch, in_flight, preempted)) pass.budget = leave_lockstep(batch, in_flight, preempted);
  if (!preempted.empty()) return;  // a victim closes admission for the whole pass
  if (!waiting_.empty()) admit_in_lockstep(pass.budget, batch, failed);
  capacity_bound_ = !waiting_.empty();
}

[[gnu::flatten]] void Scheduler::admit_in_lockstep(std::int64_t budget, Batch& batch, std::vector<Outcome>& failed) {
  Pass pass;
  pass.budget = budget;
  admit_waiting(pass, batch, failed);
}

bool Scheduler::schedule(Batch& batch, Batch* in_flight, std::vector<Outcome>& preempted,
                         std::vector<Outcome>& failed) {
  if (lockstep_) {
    if (schedule_decodes(batch)) return false;
    Pass pass;
    start_pass(pass, batch, in_flight, preempted, failed);
    finish_pass(pass, batch);
  } else {
    schedule_visiting(batch, preempted, failed);
  }
  return true;
}

void Scheduler::begin_pass(Batch& batch, Batch* in_flight, std::vector<Outcome>& preempted,
                           std::vector<Outcome>& failed) {
  Pass pass;
  start_pass(pass, batch, in_flight, preempted, failed);
}

// In lockstep form a pass has neither threshold nor cadence, so nothing of it but its budget need be remembered.
void Scheduler::admit_more(Batch& batch, std::vector<Outcome>& failed) {
  std::int64_t budget = config_.max_num_batched_tokens - batch.num_lockstep;
  for (const BatchEntry& entry : batch.entries) budget -= entry.num_tokens;
  admit_in_lockstep(budget, batch, failed);
  capacity_bound_ = !waiting_.empty();
}

void Scheduler::end_pass(Batch& batch) { finish_pass(Pass{}, batch); }

EndReason Scheduler::end_reason(const RequestState& r) const {
  if (r.eos_at > 0 && r.num_output_tokens == r.eos_at) return EndReason::stop;
  if (r.num_tokens() >= config_.max_model_len || r.num_output_tokens >= r.max_tokens) return EndReason::length;
  return EndReason::none;
}

void Scheduler::update_entry(const BatchEntry& entry, std::int64_t pass, std::vector<Outcome>& results) {
  RequestState& r = state(entry.slot);
  if (r.id != entry.id) return;  // ended or aborted meanwhile
  if (r.lockstep && passes_since_join(r, pass) == 0) {
    // Its fields stand as of this pass.
    if (entry.sample_index < 0) return;
    results.emplace_back(r.id, r.num_output_tokens + 1, EndReason::none);
    return;
  }
  r.num_inflight_tokens -= entry.num_tokens;
  const bool stale = r.num_stale_tokens > 0;
  if (stale) r.num_stale_tokens -= entry.num_tokens;
  if (entry.sample_index < 0) return;
  const bool was_running = r.status == Status::running;
  const bool had_placeholder = r.num_output_placeholders > 0;
  r.num_output_tokens += 1;
  if (!stale && had_placeholder) {
    r.num_output_placeholders -= 1;
    // Blocks filled by tokens in flight get their hash only now that the tokens are known.
    if (was_running) kv_.cache_blocks(entry.slot, r, r.num_computed_tokens - r.num_inflight_tokens);
  }
  const EndReason reason = end_reason(r);
  results.emplace_back(r.id, r.num_output_tokens, reason);
  if (reason == EndReason::none) return;
  if (was_running) {
    erase_running(entry.slot);
  } else {
    waiting_.erase(std::find(waiting_.begin(), waiting_.end(), entry.slot));
  }
  close_slot(entry.slot);
}

[[gnu::flatten]] void Scheduler::update_entries(const Batch& batch, std::vector<Outcome>& results) {
  for (const BatchEntry& entry : batch.entries) update_entry(entry, batch.pass, results);
}

// 4.1
void Scheduler::update(const Batch& batch, std::vector<Outcome>& results) {
  results_ = batch.pass + 1;
  if (lockstep_ && end_due(batch.pass)) return finish_lockstep(batch, results);
  if (!batch.entries.empty()) update_entries(batch, results);
}

}  // namespace simcluster
