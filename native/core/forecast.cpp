#include "forecast.hpp"

#include <algorithm>
#include <bit>
#include <limits>

#include "jump.hpp"

namespace simcluster {

Forecast::Prefill Forecast::prefill_of(const RequestState& r, const ExpectedEnd& end, const SchedulerConfig& config) {
  Prefill p;
  p.num_prompt_tokens = r.num_prompt_tokens;
  p.num_tokens = narrow(r.num_tokens());
  p.num_computed = r.num_computed_tokens;
  p.num_blocks = r.num_blocks;
  p.num_sampled = r.num_sampled_tokens;
  p.end = end.of(r, narrow(config.max_model_len));
  return p;
}

Forecast::Arrival Forecast::arrival_of(const Submission& submission, const SchedulerConfig& config) {
  constexpr std::int64_t kLargest = std::numeric_limits<std::int32_t>::max();
  const RequestSpec spec = Engine::spec_of(submission, config);
  Arrival arrival;
  arrival.at = submission.at;
  arrival.request.num_prompt_tokens = arrival.request.num_tokens = narrow(spec.num_prompt_tokens);
  arrival.request.end = Ending::of(narrow(std::min(spec.max_tokens, kLargest)), narrow(std::min(spec.eos_at, kLargest)),
                                   arrival.request.num_prompt_tokens, narrow(config.max_model_len));
  return arrival;
}

// Behind everybody that is due at the same time or earlier.
void Forecast::insert(const Arrival& arrival) {
  const auto place = std::upper_bound(arrivals_.begin() + static_cast<std::ptrdiff_t>(next_arrival_), arrivals_.end(),
                                      arrival.at, [](Picoseconds at, const Arrival& other) { return at < other.at; });
  arrivals_.insert(place, arrival);
}

void Forecast::add(const Submission& submission) { insert(arrival_of(submission, *config_)); }

[[gnu::flatten]] std::optional<Picoseconds> Forecast::first_token(const Submission& candidate) {
  if (failed_) return std::nullopt;
  candidate_ = arrival_of(candidate, *config_);
  candidate_.request.candidate = true;
  outside_ = arrivals_.empty() || arrivals_.back().at <= candidate_.at;
  if (!outside_) insert(candidate_);
  while (answer_ < 0 && !failed_) {
    if (!waiting_for_batch_) {
      iterate();
    } else if (!steady_ || !jump()) {
      process_results();
    }
  }
  if (failed_) return std::nullopt;
  return answer_;
}

void Forecast::remove(const Member& member) {
  num_decodes_ -= 1;
  sum_context_ -= member.offset + pass_;
  by_phase_[static_cast<std::size_t>(member.phase)] -= 1;
}

void Forecast::process_results() {
  const std::int32_t pass = results_++;
  clock_ = std::max(clock_, end_of(pass));
  waiting_for_batch_ = false;
  if (pass == target_pass_) {
    answer_ = clock_;
    return;
  }
  for (std::int32_t i = first_end_in(pass); i >= 0;) {
    const Member& m = members_[static_cast<std::size_t>(i)];
    const bool wasted = async_ && !m.known && pass_ > pass + 1;  // one decode more than it needs
    if (!m.known || pass >= apart_) remove(m);
    free_ += blocks_for(m.offset + pass + (wasted ? 2 : 1));
    num_running_ -= 1;
    unflushed_ends_ = true;
    i = m.next;
  }
  const auto at = static_cast<std::size_t>(pass);
  has_end_[at / 64] &= ~(std::uint64_t{1} << (at % 64));
}

void Forecast::iterate() {
  if (!has_requests() && num_in_flight() == 0) {
    if (next_arrival_ == arrivals_.size() && outside_) {
      if (look(room(false))) return;
      arrivals_.push_back(candidate_);
      outside_ = false;
    }
    clock_ = std::max(clock_, arrivals_[next_arrival_].at);
  }
  take_inputs();
  bool has_pass = has_requests();
  if (has_pass) begin_pass();
  if (failed_) return;
  if (outside_ && clock_ < candidate_.at) {
    from_ = clock_ + 1;
  } else if (outside_) {
    const Room open = room(has_pass);
    if (open.open()) {
      if (look(open)) return;
      outside_ = false;
      arrivals_.push_back(candidate_);
      ++next_arrival_;
      if (!has_pass) {
        has_pass = true;
        begin_pass();
      } else {
        admit_waiting();
      }
      if (failed_) return;
    }
  }
  conclude(has_pass);
}

void Forecast::take_inputs() {
  while (next_arrival_ < arrivals_.size() && arrivals_[next_arrival_].at <= clock_) {
    from_ = std::max(from_, arrivals_[next_arrival_].at);
    ++next_arrival_;
  }
}

// Asynchronous loop: no pass schedules those whose last token is in flight and known to be.
void Forecast::set_apart() {
  for (std::int32_t pass = std::max(apart_, results_); pass < pass_; ++pass) {
    for (std::int32_t i = first_end_in(pass); i >= 0; i = members_[static_cast<std::size_t>(i)].next) {
      if (members_[static_cast<std::size_t>(i)].known) remove(members_[static_cast<std::size_t>(i)]);
    }
  }
  apart_ = pass_;
}

void Forecast::begin_pass() {
  failed_ = pass_ >= kHorizon;
  if (failed_) return;
  if (async_) set_apart();
  budget_ = config_->max_num_batched_tokens - num_decodes_;
  std::int64_t needed = by_phase_[static_cast<std::size_t>(phase_)];
  std::int64_t chunk = 0;
  if (has_partial_) {
    chunk = std::min<std::int64_t>(partial_.num_tokens - partial_.num_computed, budget_);
    const std::int64_t blocks = blocks_for(partial_.num_computed + chunk);
    needed += blocks - partial_.num_blocks;
    partial_.num_blocks = narrow(blocks);
  }
  failed_ = needed > free_ || (has_partial_ && chunk < 1);  // somebody is evicted
  if (failed_) return;
  free_ -= needed;
  features_ = StepFeatures{};
  features_.num_tokens = features_.num_decodes = num_decodes_;
  features_.sum_decode_context = sum_context_;
  sum_context_ += num_decodes_;
  steady_ = !has_partial_;
  if (has_partial_) {
    has_partial_ = false;
    compute(partial_, chunk);
  }
  admit_waiting();
}

void Forecast::admit_waiting() {
  bool fits = true;
  while (fits && budget_ > 0 && seats_ > num_running_) {
    if (next_waiting_ < num_resident_) {
      const RequestState& r = snapshot_->requests[next_waiting_];
      failed_ = r.num_inflight_tokens != 0;  // results from before its eviction are still to come
      if (failed_) return;
      Prefill p = prefill_of(r, (*ends_)[next_waiting_], *config_);
      fits = admit(p);
      next_waiting_ += fits ? 1 : 0;
    } else if (next_queued_ < next_arrival_) {
      fits = admit(arrivals_[next_queued_].request);
      next_queued_ += fits ? 1 : 0;
    } else {
      break;
    }
  }
  const bool has_room = budget_ > 0 && seats_ > num_running_ && blocks_left() > 0;
  steady_ = steady_ && (has_waiting() || !has_room);
}

bool Forecast::admit(Prefill& request) {
  const std::int64_t longest = config_->max_model_len;
  const auto blocks = [&](std::int64_t tokens) { return blocks_for(std::min(tokens, longest)); };
  const std::int64_t n = std::min<std::int64_t>(request.num_tokens, budget_);
  const std::int64_t reserve = config_->scheduler_reserve_full_isl ? request.num_tokens : 0;
  const std::int64_t fresh = fresh_blocks(blocks, n, 0, reserve, blocks_left());
  const std::int64_t usable = config_->num_usable_blocks();
  if ((fresh < 0 || n < request.num_tokens) && blocks(request.num_tokens) > usable) {
    failed_ = true;  // it has outgrown the whole pool
  }
  if (fresh < 0 || failed_) return false;
  free_ -= fresh;
  num_running_ += 1;
  steady_ = false;
  request.num_blocks = narrow(fresh);
  compute(request, n);
  return !failed_;
}

// So many tokens of a prompt, or of what was lost in an eviction; with the last of them it joins the decodes.
void Forecast::compute(Prefill& request, std::int64_t tokens) {
  const bool decode = tokens == 1 && request.num_computed >= request.num_prompt_tokens;
  features_.add(request.num_computed, tokens, decode);
  budget_ -= tokens;
  request.num_computed += narrow(tokens);
  if (request.num_computed < request.num_tokens) {
    if (&request != &partial_) partial_ = request;
    has_partial_ = true;
    return;
  }
  if (request.candidate) target_pass_ = pass_;
  const std::int32_t left = request.end.last - request.num_sampled - 1;
  failed_ = left < 0;  // its end is in flight
  if (failed_) return;
  const std::int32_t size = narrow(block_size_);
  std::int32_t phase = phase_ + 1 + request.num_blocks * size - request.num_computed;
  if (phase >= size) phase -= size;
  num_decodes_ += 1;
  sum_context_ += request.num_computed;
  by_phase_[static_cast<std::size_t>(phase)] += 1;
  if (pass_ + left >= kHorizon) return;
  members_.push_back({request.num_computed - pass_ - 1, phase, -1, request.end.known});
  link(narrow(std::ssize(members_)) - 1, pass_ + left);
}

// What a newcomer finds, as Engine::room.
Room Forecast::room(bool has_pass) const {
  Room room;
  room.start = std::max(clock_, device_free_);
  const bool idle = !has_requests() && num_in_flight() == 0;
  room.until = idle ? kNever : clock_;
  if (has_pass) {
    room.features = features_;
    if (has_waiting()) return room;
  }
  if (seats_ <= num_running_ || blocks_left() <= 0) return room;
  room.blocks = blocks_left();
  room.tokens = config_->max_num_batched_tokens - room.features.num_tokens;
  return room;
}

// Whether that is all there is to know of the candidate.
bool Forecast::look(const Room& room) {
  outlook_ = Outlook::of(room, from_, *model_, *config_, *least_);
  told_ = true;
  const std::int64_t prompt = candidate_.request.num_prompt_tokens;
  if (!outlook_.tells(prompt, candidate_.at)) return false;
  answer_ = outlook_.first_token(*model_, async_, {*model_, prompt}, candidate_.at);
  return true;
}

void Forecast::conclude(bool has_pass) {
  bool is_empty = false;
  if (has_pass) {
    is_empty = features_.num_tokens == 0;
    Picoseconds end = std::max(clock_, device_free_);
    if (!is_empty) end += model_->period(model_->device_time(features_), async_);
    end_of(pass_) = device_free_ = end;
    empty(pass_) = is_empty;
    ++pass_;
    if (++phase_ == block_size_) phase_ = 0;
    unflushed_ends_ = false;
    if (num_in_flight() < depth() && (!is_empty || has_requests())) return;
  }
  waiting_for_batch_ = num_in_flight() > 0;
  if (!is_empty) return;
  bool stalled = num_running_ > 0 || has_waiting();
  for (std::int32_t pass = results_; pass < pass_; ++pass) stalled = stalled && empty(pass);
  failed_ = stalled;
}

std::int32_t Forecast::next_end() const {
  auto at = static_cast<std::size_t>(results_);
  std::uint64_t word = has_end_[at / 64] & (~std::uint64_t{0} << (at % 64));
  for (at /= 64; word == 0; word = has_end_[at]) {
    if (++at == has_end_.size()) return kHorizon;
  }
  return static_cast<std::int32_t>(at * 64) + std::countr_zero(word);
}

// The most of these passes whose blocks are free.
std::int32_t Forecast::affordable(std::int32_t passes) const {
  if ((passes / block_size_ + 1) * num_decodes_ <= free_) return passes;
  std::int64_t left = free_;
  for (std::int32_t i = 0; i < passes; ++i) {
    left -= by_phase_[static_cast<std::size_t>((phase_ + i) % block_size_)];
    if (left < 0) return i;
  }
  return passes;
}

// Passes up to the next end, all like the last one, as Engine::jump.
bool Forecast::jump() {
  steady_ = false;  // it is tried once
  if (num_in_flight() != depth() || num_decodes_ == 0 || target_pass_ >= 0) return false;
  for (std::int32_t pass = results_; pass < pass_; ++pass) {
    if (empty(pass)) return false;
  }
  std::int32_t passes = affordable(std::min(next_end() + 1, kHorizon) - pass_);
  StepFeatures features;
  features.num_tokens = features.num_decodes = num_decodes_;
  features.sum_decode_context = sum_context_;
  const Picoseconds device = model_->device_time(features);
  features.sum_decode_context += num_decodes_;
  Picoseconds growth = model_->device_time(features) - device;
  if (passes < 2 || growth < 0) return false;
  if (async_ && device < model_->host) {  // the host is slower: equal periods until the device is
    if (growth > 0) passes = narrow(std::min<std::int64_t>(passes, (model_->host - device - 1) / growth + 1));
    growth = 0;
  }
  const Picoseconds first = model_->period(device, async_), last = device_free_;
  const auto at = [&](std::int32_t n) { return last + static_cast<Picoseconds>(stretch_time(first, growth, n)); };
  clock_ = at(passes - depth());
  for (std::int32_t i = 0; i < passes; ++i) {
    free_ -= by_phase_[static_cast<std::size_t>(phase_)];
    if (++phase_ == block_size_) phase_ = 0;
  }
  sum_context_ += passes * num_decodes_;
  pass_ += passes;
  results_ += passes;
  end_of(pass_ - 2) = at(passes - 1);
  end_of(pass_ - 1) = device_free_ = at(passes);
  empty_.fill(false);
  return true;
}

}  // namespace simcluster
