// Passes that visit every running request: those of configurations without lockstep, and those in which somebody that
// runs is not in lockstep.
#include <algorithm>
#include <utility>

#include "pass.hpp"

namespace simcluster {

// 2.0
void Scheduler::prepare(Pass& pass) const {
  const std::int64_t resident = num_running_ + static_cast<std::int64_t>(waiting_.size());
  pass.threshold = resident > 1 ? config_.long_prefill_token_threshold : 0;  // a lone request is never capped
  if (pass.threshold > 0 && config_.long_prefill_token_threshold_adaptive) {
    pass.threshold = std::max(pass.threshold, pass.budget / resident);
  }
  // 0.32 applies the cadence under data parallelism only, which is not modelled.
  pass.interval = config_.vllm_version == VllmVersion::v0_32 ? 1 : config_.prefill_schedule_interval;
  if (pass.interval > 1 && !capacity_bound_ && num_executed_ + 1 - last_prefill_ < pass.interval) {
    for (std::int32_t slot = first_running_; slot >= 0; slot = request(slot).next_running) {
      pass.hold |= !request(slot).is_prefill_chunk;
    }
  }
}

// 2.5, step 1
std::int32_t Scheduler::choose_victim() const {
  if (config_.policy == Policy::fcfs) return last_running_;
  std::int32_t victim = first_running_;
  for (std::int32_t slot = victim; slot >= 0; slot = request(slot).next_running) {
    const RequestDetail& r = detail(slot);
    const RequestDetail& v = detail(victim);
    if (std::pair(r.priority, r.arrival_time) > std::pair(v.priority, v.arrival_time)) victim = slot;
  }
  return victim;
}

// 2.5, step 3
void Scheduler::preempt(std::int32_t slot) {
  RequestState& r = state(slot);
  erase_running(slot);
  kv_.release(slot, r, true);
  r.status = Status::preempted;
  r.num_computed_tokens = 0;
  r.num_output_placeholders = 0;
  r.num_stale_tokens = r.num_inflight_tokens;
  edit_detail(slot).num_preemptions += 1;
  ++num_preemptions_;
  push_waiting(slot, true);
}

// 2.1
void Scheduler::schedule_running(Pass& pass, Batch& batch, std::vector<Outcome>& preempted) {
  std::int32_t slot = first_running_;
  while (slot >= 0 && pass.budget > 0) {
    RequestState& r = state(slot);
    const bool last_in_flight = r.num_output_placeholders > 0 &&
                                r.num_computed_tokens + 2 - r.num_output_placeholders >=
                                    std::int64_t{r.num_prompt_tokens} + r.max_tokens;
    std::int64_t n = r.num_tokens() + r.num_output_placeholders - r.num_computed_tokens;
    if (pass.threshold > 0) n = std::min(n, pass.threshold);
    n = std::min({n, pass.budget, config_.max_model_len - r.num_computed_tokens - 1});
    if (last_in_flight || (pass.hold && r.is_prefill_chunk) || n <= 0) {
      slot = r.next_running;
      continue;
    }
    std::int32_t next = r.next_running;
    bool evicted_itself = false;
    while (!evicted_itself && !kv_.allocate(slot, r, n, 0, false, 0)) {
      const std::int32_t victim = choose_victim();
      if (state(victim).in_batch) {  // only under the priority policy: its tokens return to the budget
        const auto entry = std::find_if(batch.entries.begin(), batch.entries.end(),
                                        [&](const BatchEntry& e) { return e.slot == victim; });
        pass.budget += entry->num_tokens;
        batch.entries.erase(entry);
        state(victim).in_batch = false;
      }
      if (victim == next) next = state(victim).next_running;
      preempted.push_back({state(victim).id, state(victim).num_output_tokens});
      preempt(victim);
      evicted_itself = victim == slot;
    }
    if (evicted_itself) {
      if (config_.policy == Policy::fcfs || config_.vllm_version == VllmVersion::v0_32) break;
    } else {
      pass.did_prefill |= r.is_prefill_chunk;
      append(pass, batch, slot, n, false);
      next = r.next_running;
    }
    slot = next;
  }
}

// Not all are in lockstep: visit everybody. What is left of the budget.
std::int64_t Scheduler::leave_lockstep(Batch& batch, Batch* in_flight, std::vector<Outcome>& preempted) {
  Pass pass;
  pass.budget = config_.max_num_batched_tokens;
  batch.features = StepFeatures{};
  batch.num_lockstep = 0;
  settle_all(in_flight);
  schedule_running(pass, batch, preempted);
  return pass.budget;
}

void Scheduler::schedule_visiting(Batch& batch, std::vector<Outcome>& preempted, std::vector<Outcome>& failed) {
  Pass pass;
  batch.entries.clear();
  batch.features = StepFeatures{};
  batch.pass = pass_;
  batch.num_lockstep = 0;
  pass.budget = config_.max_num_batched_tokens;
  prepare(pass);
  schedule_running(pass, batch, preempted);
  if (preempted.empty()) {
    admit_waiting(pass, batch, failed);
    if (!pass.hold) capacity_bound_ = !waiting_.empty();
  }
  finish_pass(pass, batch);
}

}  // namespace simcluster
