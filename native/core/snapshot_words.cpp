#include "snapshot_words.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>
#include <stdexcept>


namespace simcluster {
namespace {

constexpr std::size_t kHeadWords = 13, kBatchWords = 8, kEntryWords = 2;
constexpr std::size_t kShortWords = 5, kRequestWords = 9;  // of a request: what is always told, and all
constexpr std::size_t kMostBatches = 2;
constexpr std::uint64_t kWaitingForBatch = 1, kUnflushedEnds = 2, kCapacityBound = 4, kWithIntake = 8;
constexpr std::uint64_t kPrefillChunk = 1, kLockstep = 2, kWhole = 4;  // of a request

std::uint64_t bits(std::int64_t value) { return static_cast<std::uint64_t>(value); }
// Two numbers of 32 bits, which may be negative.
std::uint64_t pair(std::int64_t high, std::int64_t low) { return (bits(high) << 32) | (bits(low) & 0xffffffffU); }
std::int32_t high(std::uint64_t word) { return static_cast<std::int32_t>(word >> 32); }
std::int32_t low(std::uint64_t word) { return static_cast<std::int32_t>(static_cast<std::uint32_t>(word)); }

// What is left of the words; runs out at once, never past the end.
class Words {
 public:
  explicit Words(std::span<const std::uint64_t> left) : left_(left) {}

  std::size_t size() const { return left_.size(); }
  // The next so many; null if there are less.
  const std::uint64_t* take(std::uint64_t count) {
    if (count > left_.size()) return nullptr;
    const std::uint64_t* const taken = left_.data();
    left_ = left_.subspan(count);
    return taken;
  }

 private:
  std::span<const std::uint64_t> left_;
};

// What follows from the other fields of most requests, and then needs no words: of those that wait untouched, and of
// those that take one token from every batch in flight.
void derive(RequestState& r, std::int32_t num_batches) {
  const std::int32_t in_flight = r.lockstep ? num_batches : 0;
  r.num_inflight_tokens = in_flight;
  r.num_sampled_tokens = r.num_output_tokens + in_flight;
  r.num_computed_tokens = r.lockstep ? r.num_prompt_tokens + r.num_output_tokens + in_flight - 1 : 0;
  r.num_stale_tokens = r.num_registered_tokens = 0;
}

bool follows(const RequestState& r, std::int32_t num_batches) {
  RequestState other;
  other.num_prompt_tokens = r.num_prompt_tokens;
  other.num_output_tokens = r.num_output_tokens;
  other.lockstep = r.lockstep;
  derive(other, num_batches);
  return other.num_computed_tokens == r.num_computed_tokens && other.num_inflight_tokens == r.num_inflight_tokens &&
         other.num_sampled_tokens == r.num_sampled_tokens && other.num_stale_tokens == r.num_stale_tokens &&
         other.num_registered_tokens == r.num_registered_tokens &&
         (!r.lockstep || static_cast<std::int32_t>(r.join_pass) < 0);
}

// The order of admission is that of the running, so it needs no word; who is not in lockstep has no join.
void put_request(std::vector<std::uint64_t>& words, const RequestState& r, const RequestDetail& d,
                 std::int32_t num_batches, const WordForm& form) {
  constexpr std::int32_t kMostPreemptions = 0xffff;
  const bool whole = !follows(r, num_batches) || d.priority != 0 || d.num_preemptions > kMostPreemptions;
  const std::uint64_t flags = (r.is_prefill_chunk ? kPrefillChunk : 0) | (r.lockstep ? kLockstep : 0) |
                              (whole ? kWhole : 0);
  const std::uint64_t join = r.lockstep ? (r.join_pass + 1) & 3 : 0;
  const auto small = static_cast<std::uint64_t>(r.num_output_placeholders & 3) |
                     static_cast<std::uint64_t>(r.status) << 2 | join << 4 | flags << 6 |
                     bits(whole ? 0 : d.num_preemptions) << 16;
  const std::uint64_t row[kRequestWords] = {
      bits(r.id),
      pair(r.num_prompt_tokens, r.num_output_tokens),
      pair(r.num_blocks, r.max_tokens),
      bits(form.clock.at(d.arrival_time)),
      pair(d.num_cached_tokens, static_cast<std::int64_t>(small)),
      pair(r.num_computed_tokens, r.num_inflight_tokens),
      pair(r.num_stale_tokens, r.num_sampled_tokens),
      pair(r.num_registered_tokens, d.num_preemptions),
      bits(d.priority)};
  words.insert(words.end(), row, row + (whole ? kRequestWords : kShortWords));
}

// False if there are too few words, or if it names a batch that is not there.
bool take_request(Words& words, std::int32_t num_batches, const ReaderClock& clock, RequestState& r, RequestDetail& d) {
  const std::uint64_t* const word = words.take(kShortWords);
  if (word == nullptr) return false;
  r = {};
  d = {};
  r.id = static_cast<std::int64_t>(word[0]);
  r.num_prompt_tokens = high(word[1]);
  r.num_output_tokens = low(word[1]);
  r.num_blocks = high(word[2]);
  r.max_tokens = d.visible_max_tokens = low(word[2]);
  d.arrival_time = clock.key(static_cast<std::int64_t>(word[3]));
  d.num_cached_tokens = high(word[4]);
  const std::uint64_t small = word[4];
  r.num_output_placeholders = static_cast<std::int8_t>(small & 3);
  r.status = static_cast<Status>(small >> 2 & 3);
  r.is_prefill_chunk = (small >> 6 & kPrefillChunk) != 0;
  r.lockstep = (small >> 6 & kLockstep) != 0;
  const auto join = static_cast<std::int32_t>(small >> 4 & 3) - 1;
  if (r.lockstep) r.join_pass = static_cast<std::uint32_t>(join);
  if ((small >> 6 & kWhole) == 0) {
    derive(r, num_batches);
    d.num_preemptions = static_cast<std::int32_t>(small >> 16 & 0xffff);
    return !r.lockstep || join < 0;
  }
  const std::uint64_t* const more = words.take(kRequestWords - kShortWords);
  if (more == nullptr) return false;
  r.num_computed_tokens = high(more[0]);
  r.num_inflight_tokens = low(more[0]);
  r.num_stale_tokens = high(more[1]);
  r.num_sampled_tokens = low(more[1]);
  r.num_registered_tokens = high(more[2]);
  d.num_preemptions = low(more[2]);
  d.priority = static_cast<std::int64_t>(more[3]);
  const std::int64_t in_flight = std::int64_t{r.num_sampled_tokens} - r.num_output_tokens;
  return !r.lockstep || (join < num_batches && std::max(join, 0) + in_flight <= num_batches);
}

// Which of a snapshot's requests are written: the first of the running and the first of the waiting.
struct Kept {
  Kept(const Snapshot& s, std::size_t capacity)
      : num_running(std::min<std::int64_t>(s.num_running, static_cast<std::int64_t>(capacity))),
        num_waiting(std::min<std::int64_t>(static_cast<std::int64_t>(s.requests.size()) - s.num_running,
                                           static_cast<std::int64_t>(capacity) - num_running)),
        first_waiting(s.num_running) {}

  std::int64_t num_running, num_waiting, first_waiting;

  // Place among those written; -1: not among them.
  std::int64_t place(std::int64_t request) const {
    if (request < first_waiting) return request < num_running ? request : -1;
    const std::int64_t waiting = request - first_waiting;
    return waiting < num_waiting ? num_running + waiting : -1;
  }
};

void put_batch(std::vector<std::uint64_t>& words, const Snapshot& s, std::size_t number, const Kept& kept,
               const InstanceClock& clock) {
  const Snapshot::BatchInFlight& batch = s.in_flight[number];
  std::int64_t num_lockstep = batch.num_lockstep;
  for (std::int64_t i = kept.num_running; i < s.num_running; ++i) {
    const RequestState& r = s.requests[static_cast<std::size_t>(i)];
    const bool in_it = r.lockstep && static_cast<std::int32_t>(r.join_pass) < static_cast<std::int32_t>(number);
    num_lockstep -= in_it ? 1 : 0;
  }
  const StepFeatures& f = batch.features;
  words.insert(words.end(), {bits(clock.at(batch.start)), bits(f.num_tokens), bits(f.num_decodes),
                             bits(f.sum_decode_context), bits(f.prefill_attention), bits(f.num_prefills),
                             bits(num_lockstep), 0});
  const std::size_t count_at = words.size() - 1;
  for (const Snapshot::Entry& e : batch.entries) {
    const std::int64_t place = e.request < 0 ? -1 : kept.place(e.request);
    if (place < 0) continue;  // it has ended, or was left out: nobody needs to know
    words.insert(words.end(), {pair(place, e.num_tokens), bits(e.sample_index)});
    words[count_at] += 1;
  }
}

// Sums hold for all of the running only.
bool has_sums(const Snapshot& s, const Kept& kept, const WordForm& form) {
  return s.in_step.count >= 0 && kept.num_running == s.num_running && s.in_step.by_phase.size() <= form.most_phases;
}

void put_sums(std::vector<std::uint64_t>& words, const std::vector<std::int32_t>& by_phase) {
  for (std::size_t i = 0; i < by_phase.size(); i += 2) {
    words.push_back(pair(i + 1 < by_phase.size() ? by_phase[i + 1] : 0, by_phase[i]));
  }
}

bool take_sums(Words& words, std::uint64_t num_phases, std::vector<std::int32_t>& by_phase) {
  const std::uint64_t* const word = words.take(num_phases / 2 + num_phases % 2);
  if (word == nullptr) return false;
  by_phase.resize(num_phases);
  for (std::size_t i = 0; i < num_phases; ++i) by_phase[i] = i % 2 == 0 ? low(word[i / 2]) : high(word[i / 2]);
  return true;
}

bool take_batch(Words& words, std::int64_t num_requests, const ReaderClock& clock, Snapshot::BatchInFlight& batch) {
  const std::uint64_t* const word = words.take(kBatchWords);
  if (word == nullptr) return false;
  const auto number = [&](std::size_t at) { return static_cast<std::int64_t>(word[at]); };
  batch.start = clock.at(number(0));
  batch.features = {number(1), number(2), number(3), number(4), number(5)};
  batch.num_lockstep = number(6);
  if (word[7] > words.size() / kEntryWords) return false;
  const std::uint64_t* const entry = words.take(word[7] * kEntryWords);
  batch.entries.resize(word[7]);
  for (std::size_t i = 0; i < batch.entries.size(); ++i) {
    const std::uint64_t* const at = entry + i * kEntryWords;
    batch.entries[i] = {high(at[0]), low(at[0]), low(at[1])};
    if (batch.entries[i].request < 0 || batch.entries[i].request >= num_requests) return false;
  }
  return true;
}

bool take_requests(Words& words, std::size_t count, const ReaderClock& clock, Snapshot& s) {
  s.requests.resize(count);
  s.details.resize(count);
  const auto num_batches = narrow(std::ssize(s.in_flight));
  for (std::size_t i = 0; i < count; ++i) {
    if (!take_request(words, num_batches, clock, s.requests[i], s.details[i])) return false;
    if (s.requests[i].lockstep && static_cast<std::int64_t>(i) >= s.num_running) return false;
    s.details[i].sequence = static_cast<std::uint32_t>(i);
  }
  return words.size() == 0;
}

constexpr std::int64_t kLatest = std::numeric_limits<std::int64_t>::max() / 1000 * 1000;  // whole nanoseconds [ps]

// The time since the start, within so much of it.
Picoseconds since(const ReaderClock& clock, std::int64_t ns, Picoseconds earliest) {
  const __int128 passed = static_cast<__int128>(ns) - clock.epoch_ns;
  if (clock.speed == 1.0) return static_cast<Picoseconds>(std::clamp<__int128>(passed * 1000, earliest, kLatest));
  const long double scaled = static_cast<long double>(passed) * 1000 * clock.speed;
  if (scaled <= static_cast<long double>(earliest)) return earliest;
  return scaled >= static_cast<long double>(kLatest) ? kLatest : std::llround(scaled);
}

}  // namespace

std::int64_t InstanceClock::at(Picoseconds t) const {
  if (speed == 1.0) return origin_ns + t / per_ns;
  return origin_ns + std::llround(static_cast<long double>(t) / static_cast<long double>(per_ns) / speed);
}

Picoseconds ReaderClock::at(std::int64_t ns) const { return per_ns == 1 ? ns : since(*this, ns, 0); }
Picoseconds ReaderClock::key(std::int64_t ns) const { return per_ns == 1 ? ns : since(*this, ns, -kLatest); }

std::size_t most_words(std::size_t capacity, std::int64_t block_size) {
  return kHeadWords + static_cast<std::size_t>(block_size + 1) / 2 +
         kMostBatches * (kBatchWords + capacity * kEntryWords) + capacity * kRequestWords;
}

void put_snapshot(std::vector<std::uint64_t>& words, const Snapshot& s, const WordForm& form) {
  if (s.in_flight.size() > kMostBatches) throw std::invalid_argument("a snapshot has two batches in flight at most");
  const Kept kept(s, form.capacity);
  Snapshot::LeftOut left_out = s.left_out;
  for (std::size_t i = 0; i < s.requests.size(); ++i) {
    if (kept.place(static_cast<std::int64_t>(i)) >= 0) continue;
    left_out.prefill_tokens += s.requests[i].prefill_left();
  }
  left_out.num_running += s.num_running - kept.num_running;
  left_out.num_waiting += static_cast<std::int64_t>(s.requests.size()) - s.num_running - kept.num_waiting;
  const bool summed = has_sums(s, kept, form);
  const std::uint64_t flags = (s.waiting_for_batch ? kWaitingForBatch : 0) | (s.unflushed_ends ? kUnflushedEnds : 0) |
                              (s.capacity_bound ? kCapacityBound : 0) | (form.exact ? kWithIntake : 0);
  const InstanceClock& clock = form.clock;
  words.insert(words.end(),
               {bits(form.at), bits(clock.at(s.boundary)), flags, bits(s.num_executed), bits(s.last_prefill),
                bits(s.num_free_blocks), pair(kept.num_running, kept.num_running + kept.num_waiting),
                pair(left_out.num_running, left_out.num_waiting), bits(left_out.prefill_tokens),
                pair(summed ? std::ssize(s.in_step.by_phase) : 0, std::ssize(s.in_flight)),
                bits(form.exact ? clock.at(s.intake) : 0), bits(summed ? s.in_step.count : -1),
                bits(summed ? s.in_step.context : 0)});
  if (summed) put_sums(words, s.in_step.by_phase);
  for (std::size_t i = 0; i < s.in_flight.size(); ++i) put_batch(words, s, i, kept, clock);
  for (std::size_t i = 0; i < s.requests.size(); ++i) {
    if (kept.place(static_cast<std::int64_t>(i)) < 0) continue;
    put_request(words, s.requests[i], s.details[i], narrow(std::ssize(s.in_flight)), form);
  }
}

namespace {

// Up to the requests, of which this is the number.
std::optional<std::size_t> take_front(Words& words, const ReaderClock& clock, Snapshot& s) {
  const std::uint64_t* const head = words.take(kHeadWords);
  if (head == nullptr) return std::nullopt;
  const auto number = [&](std::size_t at) { return static_cast<std::int64_t>(head[at]); };
  s.version = Snapshot::kVersion;
  s.boundary = clock.at(number(1));
  s.taken_at = clock.at(number(0));
  s.intake = (head[2] & kWithIntake) != 0 ? clock.at(number(10)) : -1;
  s.waiting_for_batch = (head[2] & kWaitingForBatch) != 0;
  s.unflushed_ends = (head[2] & kUnflushedEnds) != 0;
  s.capacity_bound = (head[2] & kCapacityBound) != 0;
  s.num_executed = number(3);
  s.last_prefill = number(4);
  s.num_free_blocks = number(5);
  s.num_running = high(head[6]);
  const std::int64_t count = low(head[6]);
  s.left_out = {high(head[7]), low(head[7]), number(8)};
  s.in_step.count = number(11);
  s.in_step.context = number(12);
  const std::int64_t num_phases = high(head[9]), num_batches = low(head[9]);
  if (num_phases < 0 || num_batches < 0 || num_batches > static_cast<std::int64_t>(kMostBatches) ||
      s.num_running < 0 || count < s.num_running ||
      !take_sums(words, static_cast<std::uint64_t>(num_phases), s.in_step.by_phase)) {
    return std::nullopt;
  }
  s.in_flight.resize(static_cast<std::size_t>(num_batches));
  for (Snapshot::BatchInFlight& batch : s.in_flight) {
    if (!take_batch(words, count, clock, batch)) return std::nullopt;
  }
  if (words.size() / kShortWords < static_cast<std::size_t>(count)) return std::nullopt;
  return static_cast<std::size_t>(count);
}

}  // namespace

bool take_snapshot(std::span<const std::uint64_t> all, const ReaderClock& clock, Snapshot& s) {
  Words words(all);
  const std::optional<std::size_t> count = take_front(words, clock, s);
  return count && take_requests(words, *count, clock, s);
}

bool take_head(std::span<const std::uint64_t> all, const ReaderClock& clock, Snapshot& s) {
  Words words(all);
  s.requests.clear();
  s.details.clear();
  return take_front(words, clock, s).has_value();
}

bool PublishedSnapshot::take(Snapshot& s) const {
  if (!take_snapshot(*words, clock, s)) return false;
  s.taken_at = std::max(taken_at, s.boundary);
  return true;
}

bool PublishedSnapshot::take_head(Snapshot& s) const {
  if (!simcluster::take_head(*words, clock, s)) return false;
  s.taken_at = std::max(taken_at, s.boundary);
  return true;
}

}  // namespace simcluster
