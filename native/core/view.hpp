// What one router knows about one instance: the last snapshot and a ledger of its own dispatches; and the TTFT
// estimate by simulating the engine forward (SFS). Source: paper eqs. 7, 8.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "forecast.hpp"
#include "frontier.hpp"
#include "snapshot.hpp"
#include "snapshot_words.hpp"

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

// Takes a snapshot when a view is first asked about it.
class SnapshotSource {
 public:
  // Of an instance as it is now; nothing has ended up to `taken_at`.
  virtual std::shared_ptr<const Snapshot> take(std::size_t instance, Picoseconds taken_at) = 0;

 protected:
  ~SnapshotSource() = default;
};

class InstanceView {
 public:
  // `mean_output` stands in for requests sent by others. Without `overlay` the router forgets what it sent after
  // the snapshot. Caching is left out of the restored engine: block identities are not published.
  InstanceView(SchedulerConfig config, const StepTimeModel& believed, std::int64_t mean_output, bool overlay);

  InstanceView(const InstanceView&) = delete;  // watchers know its address
  InstanceView& operator=(const InstanceView&) = delete;

  // `change` numbers the states of the instance where somebody counts them.
  static constexpr std::uint64_t kNotCounted = ~std::uint64_t{0};
  void refresh(std::shared_ptr<const Snapshot> snapshot, std::uint64_t change = kNotCounted);
  // The same with the snapshot that the source would take now, which it is asked for when it matters; `ahead` is of
  // the same instant. Before the instance changes or the source goes away, look() is due.
  void refresh_later(SnapshotSource& source, std::size_t instance, std::uint64_t change, Picoseconds taken_at,
                     const Ahead& ahead);
  // The same with a published one, whose requests are read when it matters. If nothing is expected to have reached the
  // instance since the last one, that is never read unless it was asked for.
  void refresh_later(PublishedSnapshot published, std::uint64_t change);
  // Whether a snapshot of the state with this number, taken at t, would tell nothing new.
  bool shows(std::uint64_t change, Picoseconds t) const { return change == change_ && t <= believed_until_; }
  void look() {
    if (source_ != nullptr) fetch();
    if (published_.words != nullptr) read_published();
  }
  void record_dispatch(const Dispatch& dispatch);
  // A request of this router that has ended, or never reached the engine. Where only ids tell what a snapshot includes,
  // one that came and went between two snapshots would else be expected for ever.
  void forget_dispatch(std::int64_t id);

  // Counts of requests, own unseen dispatches included among the waiting.
  std::int64_t num_running() { return snapshot().num_running + snapshot().left_out.num_running; }
  std::int64_t num_waiting();
  std::int64_t num_resident() { return num_running() + num_waiting(); }
  std::int64_t num_dispatched_since() {
    look();
    return static_cast<std::int64_t>(unseen_.size());
  }
  // Nobody is in the snapshot.
  bool shows_idle() { return snapshot().requests.empty() && snapshot().left_out.num_resident() == 0; }
  const Snapshot& snapshot() {
    look();
    return *snapshot_;
  }
  // The same; null until the view was refreshed.
  std::shared_ptr<const Snapshot> shown() {
    look();
    return was_shown_ ? snapshot_ : nullptr;
  }

  // Tokens still to be computed before every resident request decodes: what is left of the prompts, recomputation
  // after a preemption included. Prefix hits are known only of admitted requests. A step that runs counts as undone.
  std::int64_t prefill_tokens_left();
  // Output tokens still expected of every resident request, by own predictions, else by `mean_output`.
  std::int64_t decode_tokens_left();
  // Share of the KV blocks in use at the snapshot.
  double kv_usage();

  // When the first token of the candidate would be processed; kNever if the instance cannot serve it. From the
  // frontier where that is exact, which is built when first asked for. Throws std::invalid_argument for a time before
  // the snapshot, a length below 1, or a snapshot of another layout version.
  Picoseconds estimate_first_token(const Dispatch& candidate) {
    const Outlook& known = outlook();
    if (known.tells(candidate.prompt_tokens, candidate.at) && candidate.prompt_tokens > 0 &&
        candidate.predicted_output > 0 && candidate.max_tokens <= config_.max_model_len) {
      return known.first_token(believed(), config_.async_scheduling, {believed(), candidate.prompt_tokens}, candidate.at);
    }
    return estimate_slowly(candidate);
  }
  // The same by simulating from the snapshot to the first token; with `fast` off every step is made and every request
  // visited.
  Picoseconds simulate_first_token(const Dispatch& candidate, bool fast = true);

  // With own = least().prompt(its length), no candidate has its first token before its arrival + least().batch + own,
  // nor before the outlook's at_least + own; nor, with least().past_hinge() added to own, before its arrival +
  // least().batch + own or the outlook's at_least_hinged + own.
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

  struct Own {  // a request of this router
    std::int64_t id = -1;
    ExpectedEnd end;
  };

  Picoseconds estimate_slowly(const Dispatch& candidate);
  void fetch();
  void read_published();
  void match_requests();
  void set_bound(Picoseconds device_free);
  void tighten_bound(const Ahead& ahead);
  Picoseconds believed_until(const Snapshot& snapshot) const;
  void restore(Engine& engine);
  Picoseconds simulate_on(Engine& engine, const Dispatch& candidate);
  void build_frontier();
  std::optional<Picoseconds> foresee(const Submission& candidate);
  void forget_outlook();
  void tell() const {
    for (const Watch& w : watchers_) w.watcher->changed(w.index);
  }
  static ExpectedEnd end_of(const Dispatch& dispatch);

  SchedulerConfig config_;
  std::int64_t mean_output_;
  bool overlay_;
  LeastTime least_;
  std::shared_ptr<const Snapshot> snapshot_;
  bool was_shown_ = false;
  bool ends_change_ = false;          // with the next snapshot, even the same one: an own request was forgotten
  std::uint64_t change_ = kNotCounted;
  Picoseconds believed_until_ = -1;   // nothing that is seen up to here contradicts the snapshot
  SnapshotSource* source_ = nullptr;  // of a newer snapshot: not null until that is asked for
  std::size_t source_instance_ = 0;
  Picoseconds source_taken_at_ = 0;
  PublishedSnapshot published_;       // likewise, with words until it is read
  std::shared_ptr<Snapshot> own_;     // the last one read by this view
  // Those of the snapshot's requests that may be expected to end within so many tokens, and their tokens.
  static constexpr std::int64_t kMostTokens = 32;
  struct EndingSoon {
    std::int64_t num_requests = 0, num_tokens = 0;
  };
  std::array<EndingSoon, kMostTokens> ending_{};
  Ahead ahead_;                       // of the source, of the same instant as its snapshot
  Ahead ahead_of_ending_;             // of the same instant as ending_
  bool has_ending_ = false;
  std::vector<Own> seen_;         // own and resident in the snapshot, by id
  std::vector<Dispatch> unseen_;  // own and not yet in any snapshot, in order of dispatch
  Engine engine_;                 // scratch
  std::vector<ExpectedEnd> ends_;  // of the snapshot's requests
  std::vector<Own> still_seen_;    // scratch
  std::vector<std::int64_t> known_ids_;  // likewise
  std::unique_ptr<Frontier> frontier_;
  bool ready_ = false;             // the frontier stands for the snapshot and the unseen dispatches
  bool foreseen_ = false;          // a forecast was made from this snapshot
  Outlook outlook_;                // of the last forecast if it stands for the same, else no more than a bound
  bool told_ = false;              // it does
  std::vector<Watch> watchers_;
};

}  // namespace simcluster
