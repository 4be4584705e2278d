// The engines of one run behind one interface, and what happened to the requests: the truth about requests meets the
// engines here, and a router never gets hold of a cluster.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "engine.hpp"
#include "page_allocator.hpp"
#include "snapshot.hpp"
#include "step_time.hpp"
#include "view.hpp"

namespace simcluster {

// What a cluster needs of an engine: the native one, or one that takes its place.
class EnginePort {
 public:
  static constexpr std::size_t kLoadColumns = 10;
  // Running, waiting, free blocks, preemptions, steps, busy time [ps], prefix queries, hits, and those of preempted.
  using Load = std::array<std::int64_t, kLoadColumns>;

  virtual ~EnginePort() = default;
  virtual bool submit(const Submission& submission) = 0;
  virtual void cancel(std::int64_t id, Picoseconds at) = 0;
  virtual void advance_to(Picoseconds t) = 0;
  // Move what happened since the last call to the end of `events`.
  virtual void take_events(std::vector<Event>& events) = 0;
  virtual Snapshot snapshot() const = 0;
  virtual void snapshot_into(Snapshot& snapshot) const { snapshot = this->snapshot(); }
  virtual Load load() const = 0;
  virtual Picoseconds next_end() const = 0;
  // Advancing to an earlier instant changes nothing.
  virtual Picoseconds next_change() const = 0;
  // Equal numbers mean that a snapshot would differ in nothing but the instant at which it is taken.
  virtual std::uint64_t num_changes() const = 0;
  // What a snapshot would say; none if only a snapshot can tell.
  virtual std::optional<Ahead> ahead(const StepTimeModel& /*believed*/, bool /*async*/) const {
    return std::nullopt;
  }
};

class NativePort final : public EnginePort {
 public:
  explicit NativePort(Engine& engine) : engine_(engine) {}
  bool submit(const Submission& submission) override {
    ++num_submitted_;
    return engine_.submit(submission);
  }
  void cancel(std::int64_t id, Picoseconds at) override { engine_.cancel(id, at); }
  void advance_to(Picoseconds t) override { engine_.advance_to(t); }
  void take_events(std::vector<Event>& events) override;
  Snapshot snapshot() const override { return Snapshot::capture(engine_); }
  void snapshot_into(Snapshot& snapshot) const override { Snapshot::capture(engine_, snapshot); }
  Load load() const override;
  Picoseconds next_end() const override { return engine_.next_end(); }
  Picoseconds next_change() const override { return engine_.next_change(); }
  std::uint64_t num_changes() const override { return engine_.num_changes(); }
  std::optional<Ahead> ahead(const StepTimeModel& believed, bool async) const override {
    Ahead ahead = Snapshot::ahead(engine_, believed, async);
    ahead.num_taken = num_submitted_ - engine_.num_pending();
    return ahead;
  }

 private:
  Engine& engine_;
  std::int64_t num_submitted_ = 0;
};

class Cluster : SnapshotSource {
 public:
  // The requests of a run as columns that outlive the cluster; n requests, `num_groups` values of each where they
  // differ between instances. Empty prefix_offsets: nothing is shared.
  struct Requests {
    std::size_t num_groups = 1;
    std::span<const std::int64_t> prompt_tokens;     // (n * groups)
    std::span<const std::int64_t> output_tokens;     // (n * groups), true
    std::span<const std::int64_t> predicted_output;  // (n * groups), what routers believe
    std::span<const std::int64_t> max_tokens, priority, cancel_after;
    std::span<const bool> ends_by_length;
    std::span<const std::int64_t> prefix_offsets, prefix_values;
    std::int64_t prefix_block = 0;
    bool routers_know_ends = false;  // the oracle's
  };

  // Where an instance stands: the requests' group, and the way to the engine and back.
  struct Place {
    std::size_t group = 0;
    double request_s = 0, per_prompt_token_s = 0;
    Picoseconds output_hop = 0;
    bool shares_prefixes = false;
    bool async = false;  // the engine's loop
  };

  enum class RowStatus : std::uint8_t { unfinished, finished, rejected, failed };
  // Why a request ended, by EndReason's numbers, or where it was at the end of the run.
  enum class Reason : std::uint8_t { none, stop, length, abort, kv_capacity, exceeds_context,
                                     shed, running, waiting, in_transit };
  static constexpr Picoseconds kDidNotCome = -1;

  // What happened to one request; instants at the client's side.
  struct Row {
    std::int64_t request = -1;
    Picoseconds arrival = 0, scheduled = kDidNotCome, first_token = kDidNotCome, end = kDidNotCome;
    std::int32_t instance = -1;
    std::int32_t output_tokens = 0, cached_tokens = 0, preemptions = 0;
    RowStatus status = RowStatus::unfinished;
    Reason reason = Reason::none;
  };

  // Told to whoever waits for it. `kind`: first_token, finished, rejected or failed.
  struct Notice {
    std::int64_t request = -1;
    EventKind kind = EventKind::finished;
    Picoseconds seen = 0;
  };
  enum class Watch : std::uint8_t { nothing, ends, first_tokens_and_ends };

  // `in_order`: requests are sent by ascending number. Throws std::invalid_argument for columns of unequal length.
  Cluster(const Requests& requests, bool in_order, Watch watch);
  Cluster(const Cluster&) = delete;
  Cluster& operator=(const Cluster&) = delete;
  ~Cluster();  // engines and views outlive it

  void add_instance(std::unique_ptr<EnginePort> engine, const Place& place);
  // Returns the router's number.
  std::size_t add_router(std::vector<InstanceView*> views);

  std::size_t num_instances() const { return engines_.size(); }

  // Every instance processes what ends at or before t.
  void advance(Picoseconds t) { advance_all(t, kNobody); }
  // Only those do in which a request may end by then, so that the others can jump.
  void advance_to_ends(Picoseconds t);
  // Show a router the newest boundary of every instance at t; instances without a new one cost nothing, and a snapshot
  // is taken when the router asks about the instance.
  void refresh(std::size_t router, Picoseconds t);
  // The newest boundary of every instance at t, to be shown later.
  std::vector<std::shared_ptr<const Snapshot>> capture(Picoseconds t);
  void show(std::size_t router, const std::vector<std::shared_ptr<const Snapshot>>& snapshots);
  // What a router has been shown last, null where nothing.
  std::vector<std::shared_ptr<const Snapshot>> shown(std::size_t router);

  // A request arrives at the router at `now` and leaves it for an instance at `sent`. `router`: whose view notes it;
  // kNobody: none.
  static constexpr std::size_t kNobody = static_cast<std::size_t>(-1);
  void dispatch(std::int64_t request, std::size_t instance, Picoseconds now, Picoseconds sent, std::size_t router);
  // A request arrives and is not sent anywhere.
  void turn_away(std::int64_t request, Picoseconds now);

  // When to advance to be told of the next end of a request, if nothing arrives up to the horizon and nobody looks
  // before it; beyond the horizon, an instant before which there is none. kNever if none. Runs ahead up to the horizon.
  Picoseconds next_end(Picoseconds horizon);
  std::vector<Notice>& notices() { return notices_; }
  EnginePort::Load load(std::size_t instance) const { return engines_.at(instance)->load(); }
  std::int64_t num_open() const { return num_open_; }
  std::int64_t num_sent() const { return base_ + static_cast<std::int64_t>(rows_.size()); }

  // How many of the oldest rows may leave, at least `least`: all have ended for their clients, and no later row
  // arrives at the same instant (a run in order has no such care to take); 0 if there are not as many.
  std::size_t num_ready(std::size_t least);
  // Take the oldest rows.
  std::vector<Row> take_rows(std::size_t count);
  // Fix the end of the run; what has not reached a client before it left, or before a cut, did not happen.
  void finish(Picoseconds clock, bool cut);

 private:
  struct Seen {
    std::vector<InstanceView*> views;
  };

  std::int64_t value(std::span<const std::int64_t> column, std::int64_t request, std::size_t instance) const {
    return column[static_cast<std::size_t>(request) * requests_.num_groups + places_[instance].group];
  }
  Picoseconds engine_arrival(std::size_t instance, Picoseconds sent, std::int64_t prompt_tokens) const;
  std::vector<TokenRun> prompt_runs(std::int64_t request, std::int64_t prompt_tokens) const;
  std::shared_ptr<const Snapshot> take(std::size_t instance, Picoseconds taken_at) override;
  // Views that wait for a snapshot of an instance get it, but for those of `but`.
  void finish_looks(std::size_t instance, std::size_t but = kNobody);
  void advance_all(Picoseconds t, std::size_t refreshed);
  void advance_one(std::size_t instance, Picoseconds t);
  // After an engine was touched, advanced to t: take its events, note when it changes next.
  void settle(std::size_t instance, Picoseconds t);
  void record(std::size_t instance, const Event& event);
  Row& new_row(std::int64_t request, Picoseconds now);
  Row* find(std::int64_t request);
  static void seal(Row& row, Picoseconds limit);

  Requests requests_;
  bool in_order_;
  Watch watch_;
  std::vector<std::unique_ptr<EnginePort>> engines_;
  std::vector<Place> places_;
  std::vector<Picoseconds> next_change_;  // (j,)
  std::vector<Picoseconds> next_end_;     // (j,) when to advance to be told of an end, or an earlier instant
  std::vector<bool> knows_end_;           // (j,) whether it is that end: asking costs a run ahead
  std::vector<std::uint64_t> changes_;
  std::vector<std::uint8_t> has_looks_;            // (j,) some view may wait for a snapshot
  std::vector<std::shared_ptr<Snapshot>> newest_;  // (j,) captured at changes newest_changes_
  std::vector<std::uint64_t> newest_changes_;
  std::vector<Seen> routers_;

  GrowingVector<Row> rows_;  // sent and not taken yet, in order of sending
  std::int64_t base_ = 0;  // rows taken
  std::size_t num_ended_ = 0;  // leading rows that have ended for their clients
  std::vector<std::int32_t> place_of_;  // (n,) by request, the number of its row; empty in order
  std::vector<Notice> notices_;
  std::vector<Event> events_;  // scratch
  std::int64_t num_open_ = 0;
  Picoseconds now_ = 0;
};

}  // namespace simcluster
