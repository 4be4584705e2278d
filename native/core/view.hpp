// What one router knows about one instance: the last snapshot and a ledger of its own dispatches; and the TTFT
// estimate by simulating the engine forward (SFS). Source: paper eqs. 7, 8.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "snapshot.hpp"

namespace simcluster {

// A request as its router knows it.
struct Dispatch {
  std::int64_t id = -1;
  std::int64_t prompt_tokens = 0;
  std::int64_t predicted_output = 1;
  std::int64_t max_tokens = -1;
  bool ends_by_length = false;
  std::int64_t priority = 0;
  Picoseconds arrival_time = 0;
  Picoseconds at = 0;  // reaches the engine
};

class InstanceView {
 public:
  // `mean_output` stands in for requests sent by others. Without `overlay` the router forgets what it sent after
  // the snapshot. Caching is left out of the restored engine: block identities are not published.
  InstanceView(SchedulerConfig config, const StepTimeModel& believed, std::int64_t mean_output, bool overlay);

  // Throws std::invalid_argument for a snapshot of another layout version.
  void refresh(std::shared_ptr<const Snapshot> snapshot);
  void record_dispatch(const Dispatch& dispatch);

  // Counts of requests, own unseen dispatches included among the waiting.
  std::int64_t num_running() const { return snapshot_->num_running; }
  std::int64_t num_waiting() const;
  std::int64_t num_resident() const { return num_running() + num_waiting(); }
  std::int64_t num_dispatched_since() const { return static_cast<std::int64_t>(unseen_.size()); }
  const Snapshot& snapshot() const { return *snapshot_; }

  // Tokens still to be computed before every resident request decodes: what is left of the prompts, recomputation
  // after a preemption included. Prefix hits are known only of admitted requests. A step that runs counts as undone.
  std::int64_t prefill_tokens_left() const;
  // Output tokens still expected of every resident request, by own predictions, else by `mean_output`.
  std::int64_t decode_tokens_left() const;
  // Share of the KV blocks in use at the snapshot.
  double kv_usage() const;

  // When the first token of the candidate would be processed; kNever if the instance cannot serve it.
  Picoseconds estimate_first_token(const Dispatch& candidate);

 private:
  ExpectedEnd expected_end(std::int64_t id) const;
  static ExpectedEnd end_of(const Dispatch& dispatch);

  std::int64_t mean_output_;
  bool overlay_;
  std::shared_ptr<const Snapshot> snapshot_;
  std::vector<Dispatch> seen_;    // own and resident in the snapshot, by id
  std::vector<Dispatch> unseen_;  // own and not yet in any snapshot, in order of dispatch
  Engine engine_;                 // scratch
  std::vector<ExpectedEnd> ends_;  // scratch
};

}  // namespace simcluster
