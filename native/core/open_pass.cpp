// Stopping in the middle of a pass, behind its admissions: the only instant at which it matters to a request at the
// tail of the queue that a pass takes place. The pass then goes on with it or without it, by the same rules.
#include "engine.hpp"

namespace simcluster {

bool Engine::stops_in_passes() const {
  return scheduler_.in_lockstep_form() && scheduler_.config().enable_chunked_prefill;
}

void Engine::begin_iteration() {
  take_inputs();
  in_pass_ = true;
  has_pass_ = scheduler_.has_requests();
  if (has_pass_) begin_pass();
}

void Engine::begin_pass() {
  Batch* before = nullptr;
  Batch& batch = next_flight(before).batch;
  scheduler_.begin_pass(batch, before, preempted_, failed_);
}

void Engine::end_iteration() {
  if (has_pass_) scheduler_.end_pass(flight(num_flights_ - 1).batch);
  in_pass_ = false;
  conclude(has_pass_ ? &flight(num_flights_ - 1) : nullptr);
}

bool Engine::stop_in_pass(Picoseconds t) {
  wake_ = 0;
  if (in_pass_) end_iteration();
  // Where a pass has no room, none of an unchanged stretch behind it has: what it lacks only gets less.
  for (bool looked = false;;) {
    if (waiting_for_batch_) {
      if (!looked || !may_jump(kNever) || !jump(kNever)) process_results();
      continue;
    }
    if (stalled_) return false;
    if (idle()) {
      const Picoseconds next = inbox_.empty() ? kNever : inbox_.front().at;
      if (next > std::max(clock_, t)) return true;
      clock_ = std::max(clock_, next);
    }
    begin_iteration();
    if (room().open()) return true;
    end_iteration();
    looked = true;
  }
}

Room Engine::room() const {
  Room room;
  room.start = std::max(clock_, device_free_);
  if (in_pass_) {
    room.until = clock_;
  } else if (idle() && !stalled_ && (inbox_.empty() || inbox_.front().at > clock_)) {
    room.until = inbox_.empty() ? kNever : inbox_.front().at - 1;  // nothing happens until the next arrival
  } else {
    return room;
  }
  const bool has_batch = in_pass_ && has_pass_;
  if (has_batch) {
    const Batch& batch = flight(num_flights_ - 1).batch;
    room.features = batch.features;
    for (const BatchEntry& entry : batch.entries) room.features.add(entry.start, entry.num_tokens, entry.decode);
    if (!preempted_.empty() || !scheduler_.waiting().empty()) return room;
  }
  if (scheduler_.seats_left() <= 0 || scheduler_.blocks_left() <= 0) return room;
  room.blocks = scheduler_.blocks_left();
  room.tokens = scheduler_.config().max_num_batched_tokens - room.features.num_tokens;
  return room;
}

void Engine::join_pass(const Submission& submission) {
  wake_ = 0;
  last_input_ = std::max(last_input_, submission.at);
  scheduler_.enqueue(scheduler_.open(spec_of(submission, scheduler_.config())));
  if (!has_pass_) {
    has_pass_ = true;
    begin_pass();
  } else if (preempted_.empty()) {
    scheduler_.admit_more(flight(num_flights_ - 1).batch, failed_);
  }
}

}  // namespace simcluster
