// vLLM's V1 scheduler for a text model: the single source of truth of the simulator, the SFS estimator and the
// mock server. A copyable value: a copy is a fork of the future. Section numbers refer to the rules as laid down in
// docs/scheduler.md.
#pragma once

#include <cstdint>
#include <deque>
#include <utility>
#include <vector>

#include "config.hpp"
#include "kv_cache.hpp"
#include "request_state.hpp"

namespace simcluster {

// What a pass or a batch's results did to one request.
struct Outcome {
  std::int64_t id = -1;
  std::int64_t num_output_tokens = 0;  // delivered so far
  EndReason reason = EndReason::none;
};

struct PrefixStats {
  std::int64_t queries = 0, hits = 0;                      // tokens, first admissions only
  std::int64_t preempted_queries = 0, preempted_hits = 0;  // tokens, admissions after a preemption
};

class Scheduler {
 public:
  explicit Scheduler(const SchedulerConfig& config);

  void add(const RequestSpec& spec);
  // Client abort; the output tokens delivered so far, or -1 if no such request is resident.
  std::int64_t abort(std::int64_t id);
  // Anything waiting, running, or ended but not yet flushed to the workers.
  bool has_requests() const { return !running_.empty() || !waiting_.empty() || unflushed_ends_; }

  // One pass. Fills `batch`, `preempted` (in order of eviction) and `failed` (those that can never fit).
  void schedule(Batch& batch, std::vector<Outcome>& preempted, std::vector<Outcome>& failed);
  // Results of a batch, in batch order.
  void update(const Batch& batch, std::vector<Outcome>& results);

  const SchedulerConfig& config() const { return config_; }
  const std::vector<std::int32_t>& running() const { return running_; }
  const std::deque<std::int32_t>& waiting() const { return waiting_; }
  const RequestState& request(std::int32_t slot) const { return slots_[static_cast<std::size_t>(slot)]; }
  std::int64_t num_free_blocks() const { return kv_.num_free_blocks(); }
  const std::vector<std::int32_t>& block_table(std::int32_t slot) const { return kv_.block_table(slot); }
  const PrefixStats& prefix_stats() const { return prefix_stats_; }
  std::int64_t num_preemptions() const { return num_preemptions_; }

 private:
  friend struct Snapshot;  // captures and restores the whole state

  struct Pass;  // scratch of one pass

  RequestState& state(std::int32_t slot) { return slots_[static_cast<std::size_t>(slot)]; }
  std::int32_t open_slot(const RequestSpec& spec);
  void close_slot(std::int32_t slot);
  void push_waiting(std::int32_t slot, bool front);
  bool before(const RequestState& a, const RequestState& b) const;  // order of the priority queue

  Pass prepare() const;
  void schedule_running(Pass& pass, Batch& batch, std::vector<Outcome>& preempted);
  void admit_waiting(Pass& pass, Batch& batch, std::vector<Outcome>& failed);
  std::size_t choose_victim() const;
  void preempt(std::int32_t slot);
  void append(Pass& pass, Batch& batch, std::int32_t slot, std::int64_t tokens, bool admitted);
  void finish_pass(const Pass& pass, Batch& batch);
  EndReason end_reason(const RequestState& request) const;

  SchedulerConfig config_;
  KvCache kv_;
  std::vector<RequestState> slots_;
  std::vector<std::int32_t> free_slots_;
  std::vector<std::int32_t> running_;  // admission order, never re-sorted
  std::deque<std::int32_t> waiting_;   // FCFS: arrival order, victims in front; priority: sorted by key
  std::int64_t watermark_blocks_ = 0;
  bool unflushed_ends_ = false;
  bool capacity_bound_ = false;        // prefill cadence: the last pass left requests waiting
  std::int64_t num_executed_ = 0;      // prefill cadence: non-empty batches so far
  std::int64_t last_prefill_ = 0;      // prefill cadence: value of num_executed_ at the last prefill
  std::int64_t num_preemptions_ = 0;
  PrefixStats prefix_stats_;
};

}  // namespace simcluster
