// What one router knows about one instance: the last snapshot and a ledger of its own dispatches; and the TTFT
// estimate by simulating the engine forward (SFS). Source: paper eqs. 7, 8.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "frontier.hpp"
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

// Is told when what bounds a view's estimates has changed.
class ViewWatcher {
 public:
  virtual void changed(std::int32_t index) = 0;

 protected:
  ~ViewWatcher() = default;
};

class InstanceView {
 public:
  // `mean_output` stands in for requests sent by others. Without `overlay` the router forgets what it sent after
  // the snapshot. Caching is left out of the restored engine: block identities are not published.
  InstanceView(SchedulerConfig config, const StepTimeModel& believed, std::int64_t mean_output, bool overlay);

  InstanceView(const InstanceView&) = delete;  // watchers know its address
  InstanceView& operator=(const InstanceView&) = delete;

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

  // When the first token of the candidate would be processed; kNever if the instance cannot serve it. From the
  // frontier where that is exact, which is built when first asked for. Throws std::invalid_argument for a time before
  // the snapshot, a length below 1, or a snapshot of another layout version.
  Picoseconds estimate_first_token(const Dispatch& candidate) {
    const Outlook& known = outlook();
    if (known.tells(candidate.prompt_tokens, candidate.at) && candidate.prompt_tokens > 0 &&
        candidate.predicted_output > 0 && candidate.max_tokens <= config_.max_model_len) {
      return known.first_token(engine_.step_time(), config_.async_scheduling, candidate.prompt_tokens, candidate.at);
    }
    return estimate_slowly(candidate);
  }
  // The same by simulating from the snapshot to the first token; with `fast` off every step is made and every request
  // visited.
  Picoseconds simulate_first_token(const Dispatch& candidate, bool fast = true);

  // No candidate has its first token before its arrival + least().batch + least().prompt(its length), nor before
  // the outlook's bound + the latter.
  const Outlook& outlook() const { return ready_ ? frontier_->outlook() : outlook_; }
  const SchedulerConfig& config() const { return config_; }
  const StepTimeModel& believed() const { return engine_.step_time(); }
  const LeastTime& least() const { return least_; }
  bool refuses(std::int64_t prompt_tokens, std::int64_t max_tokens) const {
    return engine_.refuses(prompt_tokens, max_tokens);
  }
  void watch(ViewWatcher* watcher, std::int32_t index) { watchers_.push_back({watcher, index}); }
  void unwatch(const ViewWatcher* watcher);

 private:
  struct Watch {
    ViewWatcher* watcher = nullptr;
    std::int32_t index = -1;
  };

  Picoseconds estimate_slowly(const Dispatch& candidate);
  void restore(Engine& engine);
  Picoseconds simulate_on(Engine& engine, const Dispatch& candidate);
  void build_frontier();
  void look();
  void tell() const {
    for (const Watch& w : watchers_) w.watcher->changed(w.index);
  }
  ExpectedEnd expected_end(std::int64_t id) const;
  static ExpectedEnd end_of(const Dispatch& dispatch);

  SchedulerConfig config_;
  std::int64_t mean_output_;
  bool overlay_;
  LeastTime least_;
  std::shared_ptr<const Snapshot> snapshot_;
  std::vector<Dispatch> seen_;    // own and resident in the snapshot, by id
  std::vector<Dispatch> unseen_;  // own and not yet in any snapshot, in order of dispatch
  Engine engine_;                 // scratch
  std::vector<ExpectedEnd> ends_;  // scratch
  std::unique_ptr<Frontier> frontier_;
  bool ready_ = false;             // the frontier stands for the snapshot and the unseen dispatches
  std::int64_t num_built_ = 0;     // frontiers built since the last refresh
  Outlook outlook_;                // as the snapshot shows it: no more than a bound
  std::vector<Watch> watchers_;
};

}  // namespace simcluster
