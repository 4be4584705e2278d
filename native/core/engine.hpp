// One serving instance on the simulated clock: scheduler + step time + loop, synchronous or asynchronous.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "prefetch.hpp"
#include "scheduler.hpp"
#include "step_time.hpp"
#include "units.hpp"

namespace simcluster {

enum class EventKind : std::uint8_t { scheduled, first_token, token, preempted, finished, rejected, failed };

// Something a client or a recorder may see. `value`: scheduled: prefix-cache hit [tokens]; otherwise output tokens
// delivered so far.
struct Event {
  std::int64_t id = -1;
  Picoseconds at = 0;
  std::int64_t value = 0;
  EventKind kind = EventKind::scheduled;
  EndReason reason = EndReason::none;
};

// A request as the front end hands it over; the engine applies the API's rules on limits.
struct Submission {
  std::int64_t id = -1;
  std::int64_t prompt_tokens = 0;
  std::int64_t output_tokens = 0;  // the EOS comes here, unless the request ends by length
  std::int64_t max_tokens = -1;    // -1: not given
  bool ends_by_length = false;     // EOS ignored
  std::int64_t priority = 0;
  Picoseconds arrival_time = 0;    // key of the priority policy
  Picoseconds at = 0;              // reaches the engine
  std::vector<TokenRun> prompt{};
  std::uint64_t first_output = 0;
};

// One executed batch, for calibration and tests.
struct StepRecord {
  std::int64_t index = 0;
  Picoseconds start = 0, end = 0;
  StepFeatures features;
  std::int64_t num_running = 0, num_waiting = 0, num_free_blocks = 0;
};

// What a pass has left for one more request at the tail of the queue.
struct Room {
  Picoseconds until = -1;    // for requests that reach the engine up to here
  Picoseconds start = 0;     // the batch starts here, or where the request arrives if that is later
  std::int64_t tokens = 0;   // of the budget; 0: none
  std::int64_t blocks = 0;   // that an admission may take
  StepFeatures features;     // of the batch without the request

  bool open() const { return tokens > 0; }
};

class LivelockError : public std::exception {
 public:
  explicit LivelockError(std::string message) : message_(std::move(message)) {}
  const char* what() const noexcept override { return message_.c_str(); }

 private:
  std::string message_;
};

struct EngineOptions {
  bool record_tokens = false;  // an event for every token, not only the first
  bool record_steps = false;
  bool fast = true;  // decodes in lockstep and jumps, where they are exact; off: step and visit every request
};

class Engine {
 public:
  // Throws std::invalid_argument if the configuration is out of range.
  Engine(const SchedulerConfig& config, const StepTimeModel& step_time, StepNoise noise = {},
         EngineOptions options = {});

  // Hand over a request at `at`, not before the time already advanced to. A request that can never be served is
  // rejected at that instant, and the answer is false. Throws std::invalid_argument for a time in the past, a
  // length below 1, or a prompt whose token runs do not add up to its length or are given although prompts were said
  // to share nothing.
  bool submit(const Submission& submission);
  // The client leaves at `at`; applied before the results of the step that runs then.
  void cancel(std::int64_t id, Picoseconds at);

  // Process every step that ends at or before t. A step that would start at t itself waits, since requests may
  // still arrive at t.
  void advance_to(Picoseconds t) {
    if (t >= wake_) work(t, false);
    if (t < kNever) now_ = std::max(now_, t);
  }
  // Hints to a caller that knows whom it turns to next: fetch what a visit reads, first the engine itself, then, once
  // that is there, what it points to. They change nothing.
  void prefetch() const { prefetch_bytes(this, sizeof(*this)); }
  void prefetch_contents() const {
    for (const InFlight& flight : flights_) prefetch_bytes(flight.batch.entries.data(), 2 * sizeof(BatchEntry));
    prefetch_bytes(events_.data(), 4 * sizeof(Event));
    if (!inbox_.empty()) prefetch_bytes(&inbox_.front(), sizeof(Input));
    prefetch_bytes(results_.data(), sizeof(Outcome));
    scheduler_.prefetch_contents();
  }
  // Run until nothing is left to do.
  void drain() { advance_to(kNever); }
  // Earliest event if nothing else arrives; kNever if none. Runs a copy, so it is exact for every configuration.
  Picoseconds next_event() const;
  // The instant to advance to so that the next end of a request (finished, failed) is told of; kNever if none. Later
  // than the end itself where a client leaves during a step.
  Picoseconds next_end() const;
  // Advancing to an earlier instant changes nothing.
  Picoseconds next_change() const { return wake_; }
  // Grows with every change of the state at the newest step boundary.
  std::uint64_t num_changes() const { return num_changes_; }
  // Run until this request's first output token, whatever the time; kNever if it never comes.
  Picoseconds run_to_first_token(std::int64_t id);

  // open_pass.cpp: stop in the middle of a pass, where one more request can still be looked at. Only in the form
  // of passes that stops_in_passes() tells of.
  bool stops_in_passes() const;
  // Process everything before a pass that starts at t, or in which the engine stopped.
  void run_before(Picoseconds t) { work(t, false); }
  // Run on to the first pass that would take a token of a request which arrives at t at the tail of the queue, and
  // stop in it; an engine that is idle at t stays. False: it makes no progress until something arrives.
  bool stop_in_pass(Picoseconds t);
  bool in_pass() const { return in_pass_; }
  Room room() const;
  // A request that arrived before the pass in which the engine stopped, behind all others.
  void join_pass(const Submission& submission);
  // Whether the API would refuse it.
  bool refuses(std::int64_t prompt_tokens, std::int64_t max_tokens) const {
    return refusal(prompt_tokens, max_tokens) != EndReason::none;
  }

  Picoseconds now() const { return now_; }
  Picoseconds intake() const { return intake_; }          // inputs up to here were taken
  Picoseconds last_input() const { return last_input_; }  // arrival of the latest request taken
  const Scheduler& scheduler() const { return scheduler_; }
  const StepTimeModel& step_time() const { return step_time_; }
  std::int64_t num_steps() const { return num_steps_; }
  Picoseconds busy_time() const { return busy_time_; }
  std::int64_t num_pending() const { return static_cast<std::int64_t>(inbox_.size()); }

  std::vector<Event>& events() { return events_; }
  const std::vector<Event>& events() const { return events_; }
  std::vector<StepRecord>& steps() { return steps_; }

 private:
  friend struct Snapshot;
  friend class Forecast;

  struct InFlight {
    Batch batch;
    Picoseconds start = 0, end = 0;
  };
  struct Input {  // a request that has its slot but has not reached the engine
    Picoseconds at = 0;
    std::int32_t slot = -1;
  };
  struct Cancel {
    Picoseconds at = 0;
    std::int64_t id = -1;
  };

  static constexpr std::int64_t kLeastLivelockLimit = 1000;
  static constexpr std::int64_t kLongestJump = std::int64_t{1} << 31;

  InFlight& flight(std::size_t i) { return flights_[first_flight_ ^ i]; }
  const InFlight& flight(std::size_t i) const { return flights_[first_flight_ ^ i]; }

  // fast_forward.cpp: run over a stretch of steps of unchanged composition that ends before the limit; false: none.
  [[gnu::noinline]] bool jump(Picoseconds limit);
  // Whether to try: only if one more step like the last has time to run.
  bool may_jump(Picoseconds limit) const { return may_jump(limit, *in_register(&flight(num_flights_ - 1))); }
  bool may_jump(Picoseconds limit, const InFlight& last) const {
    const Picoseconds end = last.end, period = end - last.start;
    return limit - end > period && (inbox_.empty() || inbox_.front().at - end > period) && scheduler_.may_skip(depth()) &&
           last.batch.unchanging();
  }
  static StepFeatures features_of(const SteadyState& steady, std::int64_t step);
  BatchEntry partial_entry(const SteadyState& steady, std::int64_t step) const;

  enum class Told : std::uint8_t { nothing, by_pass, by_results };

  // Work until nothing is left to do before the limit or, on demand, something is told of.
  Told work(Picoseconds limit, bool until_told);
  // The same as long as the row of batches in flight is full, so that a pass follows every result. A step is a row of
  // small calls, inlined here as a whole but for the rare ones: calling them costs a seventh of its instructions, and
  // the checks that a full row spares a tenth.
  bool in_full_row() const { return waiting_for_batch_ && num_flights_ == depth() && !stalled_; }
  bool run_full_row(Picoseconds limit, bool until_told);  // true: nothing is left to do before the limit
  bool idle() const { return stalled_ || (!scheduler_.has_requests() && num_flights_ == 0); }
  bool start_iteration(Picoseconds limit);  // false: none starts before the limit
  [[gnu::noinline]] void iterate();         // take inputs, one pass, perhaps wait for the oldest batch
  InFlight& next_flight(Batch*& before) {
    InFlight& next = flight(num_flights_);
    before = num_flights_ > 0 ? &flight(num_flights_ - 1).batch : nullptr;
    ++num_flights_;
    return next;
  }
  void conclude(InFlight* next);  // null: there was no pass
  void begin_iteration();
  void begin_pass();
  void end_iteration();
  // Why the API refuses a request; none if it does not.
  EndReason refusal(std::int64_t prompt_tokens, std::int64_t max_tokens) const {
    const SchedulerConfig& config = scheduler_.config();
    if (prompt_tokens >= config.max_model_len || max_tokens > config.max_model_len) return EndReason::exceeds_context;
    return config.blocks_for(prompt_tokens) > config.num_usable_blocks() ? EndReason::kv_capacity : EndReason::none;
  }
  static RequestSpec spec_of(const Submission& submission, const SchedulerConfig& config);
  void take_inputs() {
    if (!inbox_.empty() && inbox_.front().at <= clock_) take_arrivals();
    apply_cancels(clock_ + 1);
    intake_ = clock_;
  }
  void take_arrivals();
  void apply_cancels(Picoseconds before) {
    if (!cancels_.empty()) drop_cancelled(before);
  }
  [[gnu::noinline]] void drop_cancelled(Picoseconds before);
  void launch(InFlight& flight);
  void launch_decodes(InFlight& flight);  // where nobody is admitted
  void tell_admissions(const InFlight& flight);
  void tell_results();
  [[gnu::noinline]] void tell_evictions();
  [[gnu::noinline]] void process_results();
  void deliver(const InFlight& done);
  [[gnu::noinline]] void note_stall();
  [[gnu::noinline]] void count_idle_iteration();
  [[noreturn]] void fail_livelock() const;

  Picoseconds next_input() const;
  std::size_t depth() const { return async_ ? 2 : 1; }
  void emit(EventKind kind, std::int64_t id, Picoseconds at, std::int64_t value,
            EndReason reason = EndReason::none) {
    events_.emplace_back(id, at, value, kind, reason);
  }

  // What a visit without work reads stands in front.
  Picoseconds wake_ = 0;          // nothing happens before
  Picoseconds now_ = 0;           // advanced to
  Picoseconds clock_ = 0;         // the loop's own time: start of its next iteration
  Picoseconds intake_ = -1;       // inputs up to here were taken
  Picoseconds device_free_ = 0;   // end of the last batch handed to the device
  std::size_t first_flight_ = 0, num_flights_ = 0;
  bool async_;
  bool waiting_for_batch_ = false;
  bool stalled_ = false;          // the last iteration changed nothing; only an input can
  bool in_pass_ = false;          // stopped in an iteration, behind its admissions
  bool has_pass_ = false;         // and it makes a pass
  Picoseconds last_input_ = -1;
  EngineOptions options_;
  std::array<InFlight, 2> flights_;  // a ring: batches handed to the device, oldest first
  Queue<Input> inbox_;            // by time, then order of submission
  Queue<Cancel> cancels_;         // likewise
  Scheduler scheduler_;
  StepTimeModel step_time_;
  StepNoise noise_;

  std::uint64_t num_changes_ = 0;
  std::int64_t num_steps_ = 0;
  Picoseconds busy_time_ = 0;
  std::int64_t iterations_without_token_ = 0;
  std::int64_t livelock_limit_ = kLeastLivelockLimit;

  std::vector<Event> events_;
  std::vector<StepRecord> steps_;
  std::vector<Outcome> preempted_, failed_, results_;  // scratch
};

}  // namespace simcluster
