// What a forecast takes from a snapshot: sums over those that decode, and in which pass each of them ends.
#include <bit>

#include "forecast.hpp"

namespace simcluster {

void Forecast::start(const SchedulerConfig& config, const StepTimeModel& model, const LeastTime& least,
                     const Snapshot& snapshot, const std::vector<ExpectedEnd>& ends) {
  config_ = &config;
  model_ = &model;
  least_ = &least;
  snapshot_ = &snapshot;
  ends_ = &ends;
  block_size_ = config.block_size;
  const auto size = static_cast<std::uint64_t>(block_size_);
  shift_ = std::has_single_bit(size) ? std::countr_zero(size) : -1;
  seats_ = config.num_seats();
  watermark_ = config.num_watermark_blocks();
  async_ = config.async_scheduling;
  failed_ = told_ = false;
  answer_ = -1;
  from_ = snapshot.intake + 1;
  clock_ = snapshot.boundary;
  waiting_for_batch_ = snapshot.waiting_for_batch;
  pass_ = narrow(std::ssize(snapshot.in_flight));
  phase_ = narrow(pass_ % block_size_);
  results_ = apart_ = 0;
  target_pass_ = -1;
  device_free_ = clock_;
  for (std::int32_t i = 0; i < pass_; ++i) {
    const auto k = static_cast<std::size_t>(i);
    end_of(i) = device_free_ = snapshot.end_in_flight(k, device_free_, model, async_);
    empty(i) = snapshot.in_flight[k].features.num_tokens == 0;
  }
  free_ = snapshot.num_free_blocks;
  unflushed_ends_ = snapshot.unflushed_ends;
  has_partial_ = steady_ = false;
  num_resident_ = snapshot.requests.size();
  next_waiting_ = static_cast<std::size_t>(snapshot.num_running);
  next_queued_ = next_arrival_ = 0;
  arrivals_.clear();
  start_running();
}

[[gnu::flatten]] void Forecast::start_running() {
  const RequestState* const known = snapshot_->requests.data();
  const ExpectedEnd* const end = ends_->data();
  const auto count = static_cast<std::int32_t>(snapshot_->num_running);
  const Snapshot::Sums& sums = snapshot_->in_step;
  const bool summed = sums.count >= 0 && std::ssize(sums.by_phase) == block_size_;
  num_running_ = count;
  num_decodes_ = summed ? sums.count : 0;
  sum_context_ = summed ? sums.context : 0;
  if (summed) {
    by_phase_ = sums.by_phase;
  } else {
    by_phase_.assign(static_cast<std::size_t>(block_size_), 0);
  }
  members_.resize(static_cast<std::size_t>(count));
  has_end_.fill(0);
  const Rejoin rejoin(*config_, pass_);
  std::int32_t linked = 0;
  for (std::int32_t i = 0; i < count; ++i) {
    const RequestState& r = known[i];
    if (!r.lockstep) {
      // The one prefill that is not finished is the last; others have to be visited, as has a result from before an
      // eviction.
      failed_ = i + 1 < count || !r.is_prefill_chunk || r.num_stale_tokens != 0 || r.num_output_placeholders != 0;
      if (failed_) return;
      has_partial_ = true;
      partial_ = prefill_of(r, end[i], *config_);
      break;
    }
    const Ending last = end[i].of(r, rejoin.max_model_len);
    const std::int32_t last_pass = rejoin.last_pass_of(r, last);
    Member member{r.num_computed_tokens - pass_, 0, -1, last.known};
    if (summed && rejoin.in_step(r)) {
      failed_ = !rejoin.may_end(last_pass, last);
      if (last_pass >= kHorizon) continue;
      member.phase = rejoin.block_phase_of(r);
    } else {
      failed_ = !add_up(r, last, member);
    }
    if (failed_) return;
    if (last_pass >= kHorizon) continue;
    members_[static_cast<std::size_t>(linked)] = member;
    link(linked++, last_pass);
  }
  members_.resize(static_cast<std::size_t>(linked));
}

// One that is not among the sums of the snapshot.
bool Forecast::add_up(const RequestState& r, Ending last, Member& member) {
  Rejoin rejoin(*config_, pass_);
  if (!rejoin(r, last)) return false;
  num_decodes_ += 1;
  sum_context_ += rejoin.context;
  by_phase_[static_cast<std::size_t>(rejoin.block_phase)] += 1;
  member.offset = rejoin.context - pass_;
  member.phase = rejoin.block_phase;
  return true;
}

}  // namespace simcluster
