// vLLM's V1 scheduler for a text model: the single source of truth of the simulator, the SFS estimator and the
// mock server. A copyable value: a copy is a fork of the future. Section numbers refer to the rules as laid down in
// docs/scheduler.md.
//
// Lockstep. Under FCFS without a cap or a cadence of prefills every decoding request gets one token in every pass, so
// a pass need not visit them: its position is "tokens when it joined + passes since", its end a known pass, and its
// need of a new block follows from a residue. The fields of such a request stand as of the pass it joined; settled()
// gives the present ones. A pass that preempts visits those it preempts; every pass of other configurations visits all.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

#include "config.hpp"
#include "end_wheel.hpp"
#include "kv_cache.hpp"
#include "page_allocator.hpp"
#include "queue.hpp"
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

// What repeats in a stretch of passes that admit, end and preempt nobody.
struct SteadyState {
  std::int64_t passes = 0;         // at most so many; 0: the next pass is not of this kind
  std::int64_t num_decodes = 0;
  std::int64_t decode_context = 0;  // of the first pass; grows by num_decodes
  std::int64_t chunk = 0;           // prefill tokens of the one partial prefill; 0: none
  std::int64_t chunk_start = 0;     // of the first pass; grows by chunk
};

class Scheduler {
 public:
  explicit Scheduler(const SchedulerConfig& config);

  // From now on leave decodes in lockstep out of batches and results, where the configuration allows it.
  void use_lockstep();

  // Throws std::invalid_argument if the token runs of a prompt do not add up to its length, or are given where prompts
  // were said to share nothing.
  void check_prompt(std::span<const TokenRun> prompt, std::int64_t tokens) const;
  // A request that joins the queue. Throws as check_prompt does, and for a prompt longer than any context.
  void add(const RequestSpec& spec) { enqueue(open(spec)); }
  // The same in two steps: take a slot now, join the queue later. `withdraw` gives the slot back before that.
  std::int32_t open(const RequestSpec& spec);
  void enqueue(std::int32_t slot) { push_waiting(slot, false); }
  void withdraw(std::int32_t slot) { free_slot(slot); }
  // Client abort; the output tokens delivered so far, or -1 if no such request is resident.
  std::int64_t abort(std::int64_t id);
  // Anything waiting, running, or ended but not yet flushed to the workers.
  bool has_requests() const { return num_running_ > 0 || !waiting_.empty() || unflushed_ends_; }

  // One pass. Fills `batch`, and `preempted` (in order of eviction) and `failed` (those that can never fit), which come
  // empty.
  // `in_flight`: the batch before, if its results are still to come (asynchronous loop), else null.
  // False: the batch is one of decodes in lockstep alone, and nothing else was filled.
  bool schedule(Batch& batch, Batch* in_flight, std::vector<Outcome>& preempted, std::vector<Outcome>& failed);
  // The same in parts, in lockstep form alone, so that requests added meanwhile still join the pass (open_pass.cpp).
  bool in_lockstep_form() const { return lockstep_; }
  void begin_pass(Batch& batch, Batch* in_flight, std::vector<Outcome>& preempted, std::vector<Outcome>& failed);
  void admit_more(Batch& batch, std::vector<Outcome>& failed);
  void end_pass(Batch& batch);
  std::int64_t seats_left() const { return seats() - num_running_; }
  std::int64_t blocks_left() const { return kv_.num_free_blocks() - watermark(); }  // that an admission may take
  // Results of a batch, in batch order, into `results`, which comes empty. Tokens of decodes in lockstep are told only
  // where they end a request.
  void update(const Batch& batch, std::vector<Outcome>& results);

  // A stretch of passes, each followed or preceded by results, that change counters alone.
  SteadyState steady_state(std::size_t depth);
  // If not, there are none for certain.
  bool may_skip(std::size_t depth) const {
    return lockstep_ && group_.ending.empty() && next_end() - results_ >= static_cast<std::int64_t>(2 * depth);
  }
  // Make `passes` such passes, and process as many results.
  void skip(const SteadyState& steady, std::int64_t passes, std::size_t depth);
  // The one prefill that is not finished; -1 if none.
  std::int32_t partial_prefill() const;

  // What a pass, its results and a new request read beside this object.
  void prefetch_contents() const;

  const SchedulerConfig& config() const { return config_; }
  std::int64_t num_running() const { return num_running_; }
  std::vector<std::int32_t> running() const;  // in order
  const Queue<std::int32_t>& waiting() const { return waiting_; }
  // As stored; what never changes after admission is right in lockstep too.
  const RequestState& request(std::int32_t slot) const { return slots_[static_cast<std::size_t>(slot)]; }
  const RequestDetail& detail(std::int32_t slot) const { return details_[static_cast<std::size_t>(slot)]; }
  // As it is now.
  RequestState settled(std::int32_t slot) const;
  // Members of a batch in front of its entries, spelled out.
  std::vector<BatchEntry> lockstep_entries(const Batch& batch) const;
  std::int64_t num_free_blocks() const { return kv_.num_free_blocks(); }
  std::int64_t num_passes() const { return pass_; }
  const std::vector<std::int32_t>& block_table(std::int32_t slot) const { return kv_.block_table(slot); }
  const PrefixStats& prefix_stats() const { return prefix_stats_; }
  std::int64_t num_preemptions() const { return num_preemptions_; }

 private:
  friend struct Snapshot;  // captures and restores the whole state

  struct Pass;  // scratch of one pass
  // The pass that samples the last token of a request, and its slot: (pass << kSlotBits) + slot.
  using End = std::uint64_t;
  static constexpr int kSlotBits = 24;
  static std::int64_t pass_of(End end) { return static_cast<std::int64_t>(end >> kSlotBits); }
  static std::int32_t slot_of(End end) { return static_cast<std::int32_t>(end & ((End{1} << kSlotBits) - 1)); }
  struct Lockstep {
    std::int64_t size = 0;               // decodes of the next pass
    std::int64_t num_excluded = 0;       // running, but in no pass any more
    std::int64_t sum_context = 0;        // computed tokens of the decodes
    std::vector<std::int32_t> by_phase;  // how many need a block in the passes of each phase
    EndWheel ends;
    std::vector<End> ending;             // their last token is in flight (asynchronous loop), by pass
  };

  RequestState& state(std::int32_t slot) { return slots_[static_cast<std::size_t>(slot)]; }
  RequestDetail& edit_detail(std::int32_t slot) { return details_[static_cast<std::size_t>(slot)]; }
  void free_slot(std::int32_t slot);
  void close_slot(std::int32_t slot);
  void push_running(std::int32_t slot);
  void erase_running(std::int32_t slot);
  void push_waiting(std::int32_t slot, bool front);
  bool before(std::int32_t a, std::int32_t b) const;  // order of the priority queue

  void prepare(Pass& pass) const;
  void start_pass(Pass& pass, Batch& batch, Batch* in_flight, std::vector<Outcome>& preempted,
                  std::vector<Outcome>& failed);
  [[gnu::noinline]] void schedule_visiting(Batch& batch, std::vector<Outcome>& preempted,
                                           std::vector<Outcome>& failed);
  [[gnu::noinline]] std::int64_t leave_lockstep(Batch& batch, Batch* in_flight, std::vector<Outcome>& preempted);
  std::int64_t seats() const { return config_.num_seats(); }
  std::int64_t watermark() const { return num_running_ == 0 ? 0 : watermark_blocks_; }
  void schedule_running(Pass& pass, Batch& batch, std::vector<Outcome>& preempted);
  void admit_waiting(Pass& pass, Batch& batch, std::vector<Outcome>& failed);
  std::int32_t choose_victim() const;
  void preempt(std::int32_t slot);
  void append(Pass& pass, Batch& batch, std::int32_t slot, std::int64_t tokens, bool admitted);
  void admit_in_lockstep(std::int64_t budget, Batch& batch, std::vector<Outcome>& failed);
  void finish_pass(const Pass& pass, Batch& batch);
  void finish_entries(Batch& batch);
  EndReason end_reason(const RequestState& request) const;
  void update_entries(const Batch& batch, std::vector<Outcome>& results);
  void update_entry(const BatchEntry& entry, std::int64_t pass, std::vector<Outcome>& results);

  // lockstep.cpp
  std::int64_t limit_of(const RequestState& r) const {  // output tokens it can have, EOS or not
    return std::min<std::int64_t>(r.max_tokens, config_.max_model_len - r.num_prompt_tokens);
  }
  // It ends where its limit does, so no pass goes beyond.
  bool known_end(const RequestState& r) const { return r.eos_at <= 0 || r.eos_at >= limit_of(r); }
  // Decodes from the pass it joined to its last token.
  std::int64_t decodes_left(const RequestState& r) const {
    return (known_end(r) ? limit_of(r) : r.eos_at) - r.num_sampled_tokens;
  }
  static std::int64_t passes_since_join(const RequestState& r, std::int64_t pass) {
    return static_cast<std::int32_t>(static_cast<std::uint32_t>(pass) - r.join_pass);
  }
  static End end_at(std::int64_t pass, std::int32_t slot) {
    return (static_cast<End>(pass) << kSlotBits) + static_cast<End>(slot);
  }
  std::size_t phase_after(std::int64_t phase, std::int64_t passes) const {  // passes: less than a block
    const std::int64_t at = phase + passes;
    return static_cast<std::size_t>(at < config_.block_size ? at : at - config_.block_size);
  }
  // A decode that has `context` tokens in a pass of the given phase, and room for so many more in its last block.
  void count_decode(std::int64_t context, std::int64_t phase, std::int64_t room) {
    group_.size += 1;
    group_.sum_context += context;
    group_.by_phase[phase_after(phase, room)] += 1;
  }
  void join(const BatchEntry& entry);
  void exclude(RequestState& request);
  void leave(RequestState& request);
  void settle(RequestState& request) const;
  void settle_all(Batch* in_flight);
  void spell_out(Batch& batch) const;
  void forget_lockstep();
  std::int64_t next_end() const { return group_.ends.next(); }  // or an earlier pass
  // Whether results of this pass end a request in lockstep.
  bool end_due(std::int64_t pass) const {
    return next_end() <= pass || (!group_.ending.empty() && pass_of(group_.ending.front()) <= pass);
  }
  void forget_end(std::int32_t slot);
  void collect_ending();
  // Whether a request in lockstep is a decode of that pass.
  bool is_decode_of(const RequestState& r, std::int64_t pass) const {
    const std::int64_t decodes = passes_since_join(r, pass);
    const bool wasted = config_.async_scheduling && !known_end(r);
    return decodes >= 1 && decodes <= decodes_left(r) + (wasted ? 1 : 0);
  }
  [[gnu::noinline]] void evict_last(Batch* in_flight, std::vector<Outcome>& preempted);
  [[gnu::noinline]] void take_for_decodes(Batch* in_flight, std::vector<Outcome>& preempted);
  // All that a pass does while nobody waits, prefills or has to give way; else false.
  bool schedule_decodes(Batch& batch);
  void take_decodes(Batch& batch);
  void count_pass(const Batch& batch);
  // False: not all are in lockstep, nothing was changed.
  bool schedule_lockstep(Pass& pass, Batch& batch, Batch* in_flight, std::vector<Outcome>& preempted);
  [[gnu::noinline]] void finish_lockstep(const Batch& batch, std::vector<Outcome>& results);
  [[gnu::noinline]] void sort_by_admission(std::size_t count);
  Outcome finish(std::int32_t slot);
  bool all_in_lockstep(std::int32_t partial) const {
    return group_.size + group_.num_excluded + (partial >= 0 ? 1 : 0) == num_running_;
  }
  void advance_passes(std::int64_t passes) {
    pass_ += passes;
    phase_ = (phase_ + passes) % config_.block_size;
  }
  bool can_admit(std::int64_t budget, std::int64_t taken);
  std::int64_t blocks_needed(const SteadyState& steady, std::int64_t passes) const;
  std::int64_t affordable(const SteadyState& steady, std::int64_t passes) const;

  // What every pass reads stands together.
  std::int64_t pass_ = 0;     // number of the next pass
  std::int64_t results_ = 0;  // results of all passes before this one are processed
  std::int64_t phase_ = 0;    // pass_ modulo the block size
  std::int64_t num_running_ = 0;
  std::int32_t first_running_ = -1, last_running_ = -1;  // linked, in order of admission, never re-sorted
  Lockstep group_;
  GrowingVector<RequestState> slots_;
  Queue<std::int32_t> waiting_;  // FCFS: arrival order, victims in front; priority: sorted by key
  std::int64_t num_executed_ = 0;  // prefill cadence: non-empty batches so far
  std::int64_t last_prefill_ = 0;  // prefill cadence: value of num_executed_ at the last prefill
  bool lockstep_ = false;
  bool unflushed_ends_ = false;
  bool capacity_bound_ = false;  // prefill cadence: the last pass left requests waiting
  std::uint32_t sequence_ = 0;
  std::vector<std::int32_t> free_slots_;
  GrowingVector<RequestDetail> details_;
  std::int64_t watermark_blocks_ = 0;
  std::int64_t num_preemptions_ = 0;
  PrefixStats prefix_stats_;
  SchedulerConfig config_;
  KvCache kv_;
};

}  // namespace simcluster
