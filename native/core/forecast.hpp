// The first token of a newcomer straight from a snapshot, without an engine. In lockstep form a pass needs of those
// that decode only sums and of those that wait only their lengths, so a request is read once where it joins and once
// where it ends. The loop and the passes are those of engine.cpp, scheduler.cpp and lockstep.cpp; where more than sums
// would be needed (an eviction, a result of a request that was evicted) it gives up, and an engine has to tell.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <vector>

#include "frontier.hpp"
#include "rejoin.hpp"
#include "snapshot.hpp"

namespace simcluster {

class Forecast {
 public:
  // What the snapshot shows of an engine in lockstep form with chunked prefill (Engine::stops_in_passes), every request
  // expected to end so. The references are kept until the next start.
  void start(const SchedulerConfig& config, const StepTimeModel& model, const LeastTime& least,
             const Snapshot& snapshot, const std::vector<ExpectedEnd>& ends);
  // One more request that the engine will get and does not refuse, in the order of submission.
  void add(const Submission& submission);
  // When the first token of the candidate comes, which the engine gets last and does not refuse; once. None: only an
  // engine can tell.
  std::optional<Picoseconds> first_token(const Submission& candidate);
  // What that told of others in its place; null: nothing.
  const Outlook* outlook() const { return told_ ? &outlook_ : nullptr; }

 private:
  static constexpr std::int32_t kHorizon = 1024;  // passes; for more of them an engine that jumps is the better way

  struct Member {  // a decode: has offset + p tokens before pass p
    std::int32_t offset = 0;
    std::int32_t phase = 0;  // of the passes in which it needs a block
    std::int32_t next = -1;  // that ends in the same pass
    bool known = false;      // its end, beforehand
  };
  struct Prefill {  // a request that does not decode
    std::int32_t num_prompt_tokens = 0, num_tokens = 0, num_computed = 0, num_blocks = 0, num_sampled = 0;
    Ending end;
    bool candidate = false;
  };
  struct Arrival {
    Picoseconds at = 0;
    Prefill request;
  };

  std::int64_t blocks_for(std::int64_t tokens) const {
    const std::int64_t least = tokens + block_size_ - 1;
    return shift_ >= 0 ? least >> shift_ : least / block_size_;
  }
  std::int32_t num_in_flight() const { return pass_ - results_; }
  std::int32_t depth() const { return async_ ? 2 : 1; }
  bool has_waiting() const { return next_waiting_ < num_resident_ || next_queued_ < next_arrival_; }
  bool has_requests() const { return num_running_ > 0 || has_waiting() || unflushed_ends_; }
  std::int64_t blocks_left() const { return free_ - (num_running_ == 0 ? 0 : watermark_); }
  Picoseconds& end_of(std::int32_t pass) { return end_[static_cast<std::size_t>(pass & 1)]; }
  bool& empty(std::int32_t pass) { return empty_[static_cast<std::size_t>(pass & 1)]; }

  void start_running();
  bool add_up(const RequestState& r, Ending last, Member& member);
  static Arrival arrival_of(const Submission& submission, const SchedulerConfig& config);
  static Prefill prefill_of(const RequestState& r, const ExpectedEnd& end, const SchedulerConfig& config);
  void insert(const Arrival& arrival);
  // Into the list of those that end in a pass.
  void link(std::int32_t member, std::int32_t last_pass) {
    const auto at = static_cast<std::size_t>(last_pass);
    std::uint64_t& word = has_end_[at / 64];
    const std::uint64_t bit = std::uint64_t{1} << (at % 64);
    members_[static_cast<std::size_t>(member)].next = (word & bit) != 0 ? first_end_[at] : -1;
    first_end_[at] = member;
    word |= bit;
  }
  std::int32_t first_end_in(std::int32_t pass) const {  // -1: nobody
    const auto at = static_cast<std::size_t>(pass);
    return (has_end_[at / 64] >> (at % 64) & 1) != 0 ? first_end_[at] : -1;
  }
  void remove(const Member& member);

  void process_results();
  void iterate();
  void take_inputs();
  void set_apart();
  void begin_pass();
  void admit_waiting();
  bool admit(Prefill& request);
  void compute(Prefill& request, std::int64_t tokens);
  Room room(bool has_pass) const;
  bool look(const Room& room);
  void conclude(bool has_pass);
  bool jump();
  std::int32_t next_end() const;
  std::int32_t affordable(std::int32_t passes) const;

  const SchedulerConfig* config_ = nullptr;
  const StepTimeModel* model_ = nullptr;
  const LeastTime* least_ = nullptr;
  const Snapshot* snapshot_ = nullptr;
  const std::vector<ExpectedEnd>* ends_ = nullptr;
  std::int64_t block_size_ = 1, seats_ = 0, watermark_ = 0;
  int shift_ = -1;  // the block size is 2^shift; -1: no power of two
  bool async_ = false;

  Arrival candidate_;
  bool outside_ = false;  // the candidate, since nobody that is known of comes behind it
  bool failed_ = false, told_ = false;
  Picoseconds from_ = 0, answer_ = -1;
  Outlook outlook_;

  // The loop.
  Picoseconds clock_ = 0, device_free_ = 0;
  std::array<Picoseconds, 2> end_{};  // of the batches in flight, by pass modulo 2
  std::array<bool, 2> empty_{};
  bool waiting_for_batch_ = false;

  // The scheduler.
  std::int32_t pass_ = 0, results_ = 0, phase_ = 0;
  std::int32_t apart_ = 0;         // asynchronous loop: known ends before this pass are set apart
  std::int32_t target_pass_ = -1;  // samples the first token of the candidate
  std::int64_t num_running_ = 0, num_decodes_ = 0, sum_context_ = 0, free_ = 0, budget_ = 0;
  bool unflushed_ends_ = false, has_partial_ = false;
  bool steady_ = false;  // the last pass had decodes alone and had to leave whoever waited
  StepFeatures features_;
  Prefill partial_;
  std::size_t next_waiting_ = 0, num_resident_ = 0;  // of the snapshot's requests
  std::size_t next_queued_ = 0, next_arrival_ = 0;   // of the arrivals: in the queue, and still to come
  std::vector<Arrival> arrivals_;
  std::vector<Member> members_;
  std::vector<std::int32_t> by_phase_;
  std::array<std::uint64_t, kHorizon / 64> has_end_{};
  std::array<std::int32_t, kHorizon> first_end_{};  // valid where has_end_ says so
};

}  // namespace simcluster
