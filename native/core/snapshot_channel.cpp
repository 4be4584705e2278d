#include "snapshot_channel.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <stdexcept>
#include <utility>

namespace simcluster {
namespace {

// Of what follows here; a reader of another one stays away.
constexpr std::uint64_t kFormat = (std::uint64_t{1} << 32) | Snapshot::kVersion;
constexpr std::size_t kHeadWords = 10, kBatchWords = 8, kEntryWords = 2, kRequestWords = 9;
constexpr std::size_t kMostBatches = 2;
constexpr std::int64_t kMostNs = std::numeric_limits<std::int64_t>::max() / 1000;  // that picoseconds can say
constexpr std::uint64_t kWaitingForBatch = 1, kUnflushedEnds = 2, kCapacityBound = 4;
constexpr std::uint64_t kPrefillChunk = 1, kLockstep = 2;  // of a request

std::uint64_t bits(std::int64_t value) { return static_cast<std::uint64_t>(value); }
// Two numbers of 32 bits, which may be negative.
std::uint64_t pair(std::int64_t high, std::int64_t low) { return (bits(high) << 32) | (bits(low) & 0xffffffffU); }
std::int32_t high(std::uint64_t word) { return static_cast<std::int32_t>(word >> 32); }
std::int32_t low(std::uint64_t word) { return static_cast<std::int32_t>(static_cast<std::uint32_t>(word)); }

std::size_t record_words(std::size_t capacity) {
  return kHeadWords + kMostBatches * (kBatchWords + capacity * kEntryWords) + capacity * kRequestWords;
}

std::vector<std::uint64_t> words_of(const SchedulerConfig& c) {
  const std::uint64_t flags = static_cast<std::uint64_t>(c.enable_chunked_prefill) |
                              static_cast<std::uint64_t>(c.enable_prefix_caching) << 1 |
                              static_cast<std::uint64_t>(c.long_prefill_token_threshold_adaptive) << 2 |
                              static_cast<std::uint64_t>(c.scheduler_reserve_full_isl) << 3 |
                              static_cast<std::uint64_t>(c.async_scheduling) << 4 |
                              static_cast<std::uint64_t>(c.shared_prefixes) << 5;
  return {bits(c.max_num_batched_tokens),
          bits(c.max_num_seqs),
          bits(c.max_num_active_seqs),
          bits(c.max_model_len),
          bits(c.block_size),
          bits(c.num_gpu_blocks),
          bits(c.long_prefill_token_threshold),
          bits(c.prefill_schedule_interval),
          std::bit_cast<std::uint64_t>(c.watermark),
          static_cast<std::uint64_t>(c.policy),
          static_cast<std::uint64_t>(c.vllm_version),
          flags};
}

SchedulerConfig config_of(const std::vector<std::uint64_t>& words) {
  SchedulerConfig c;
  if (words.size() != words_of(c).size()) throw std::runtime_error("a snapshot's options are not as expected");
  const auto number = [&](std::size_t at) { return static_cast<std::int64_t>(words[at]); };
  c.max_num_batched_tokens = number(0);
  c.max_num_seqs = number(1);
  c.max_num_active_seqs = number(2);
  c.max_model_len = number(3);
  c.block_size = number(4);
  c.num_gpu_blocks = number(5);
  c.long_prefill_token_threshold = number(6);
  c.prefill_schedule_interval = number(7);
  c.watermark = std::bit_cast<double>(words[8]);
  c.policy = words[9] == 0 ? Policy::fcfs : Policy::priority;
  c.vllm_version = words[10] == 0 ? VllmVersion::v0_32 : VllmVersion::v0_33;
  const std::uint64_t flags = words[11];
  c.enable_chunked_prefill = (flags & 1) != 0;
  c.enable_prefix_caching = (flags & 2) != 0;
  c.long_prefill_token_threshold_adaptive = (flags & 4) != 0;
  c.scheduler_reserve_full_isl = (flags & 8) != 0;
  c.async_scheduling = (flags & 16) != 0;
  c.shared_prefixes = (flags & 32) != 0;
  return c;
}

void put_request(std::vector<std::uint64_t>& words, const RequestState& r, const RequestDetail& d,
                 const InstanceClock& clock) {
  const std::uint64_t flags = (r.is_prefill_chunk ? kPrefillChunk : 0) | (r.lockstep ? kLockstep : 0);
  const std::uint64_t small = static_cast<std::uint8_t>(r.num_output_placeholders) |
                              static_cast<std::uint64_t>(r.status) << 8 | flags << 16;
  const std::uint64_t row[kRequestWords] = {
      bits(r.id),
      pair(r.num_prompt_tokens, r.num_output_tokens),
      pair(r.num_computed_tokens, r.num_inflight_tokens),
      pair(r.num_stale_tokens, r.num_sampled_tokens),
      pair(r.num_blocks, r.max_tokens),
      pair(static_cast<std::int32_t>(r.join_pass), static_cast<std::int64_t>(small)),
      bits(d.priority),
      bits(clock.at(d.arrival_time)),
      pair(d.num_cached_tokens, d.num_preemptions)};
  words.insert(words.end(), row, row + kRequestWords);
}

void take_request(const std::uint64_t* word, RequestState& r, RequestDetail& d) {
  r = {};
  d = {};
  r.id = static_cast<std::int64_t>(word[0]);
  r.num_prompt_tokens = high(word[1]);
  r.num_output_tokens = low(word[1]);
  r.num_computed_tokens = high(word[2]);
  r.num_inflight_tokens = low(word[2]);
  r.num_stale_tokens = high(word[3]);
  r.num_sampled_tokens = low(word[3]);
  r.num_blocks = high(word[4]);
  r.max_tokens = d.visible_max_tokens = low(word[4]);
  r.join_pass = static_cast<std::uint32_t>(high(word[5]));
  const std::uint64_t small = word[5];
  r.num_output_placeholders = static_cast<std::int8_t>(small & 0xff);
  r.status = static_cast<Status>(small >> 8 & 3);
  r.is_prefill_chunk = (small >> 16 & kPrefillChunk) != 0;
  r.lockstep = (small >> 16 & kLockstep) != 0;
  d.priority = static_cast<std::int64_t>(word[6]);
  d.num_cached_tokens = high(word[8]);
  d.num_preemptions = low(word[8]);
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
    if (place < 0) continue;  // it has ended, or was left out
    words.insert(words.end(), {pair(place, e.num_tokens), bits(e.sample_index)});
    words[count_at] += 1;
  }
}

}  // namespace

std::int64_t InstanceClock::at(Picoseconds t) const {
  const std::int64_t ns = t / per_ns;
  if (speed == 1.0) return origin_ns + ns;
  return origin_ns + static_cast<std::int64_t>(std::llround(static_cast<double>(ns) / speed));
}

SnapshotWriter::SnapshotWriter(const std::string& name, std::size_t capacity, const SchedulerConfig& config,
                               std::size_t num_slots)
    : capacity_(capacity), channel_(name, {kFormat, num_slots, record_words(capacity), words_of(config)}) {}

void SnapshotWriter::publish(const Snapshot& s, const InstanceClock& clock, std::int64_t now_ns) {
  if (channel_.is_closed()) throw std::runtime_error("this writer of snapshots was closed");
  if (s.in_flight.size() > kMostBatches) throw std::invalid_argument("a snapshot has two batches in flight at most");
  const Kept kept(s, capacity_);
  Snapshot::LeftOut left_out = s.left_out;
  for (std::size_t i = 0; i < s.requests.size(); ++i) {
    if (kept.place(static_cast<std::int64_t>(i)) >= 0) continue;
    left_out.prefill_tokens += s.requests[i].prefill_left();
  }
  left_out.num_running += s.num_running - kept.num_running;
  left_out.num_waiting += static_cast<std::int64_t>(s.requests.size()) - s.num_running - kept.num_waiting;
  const std::uint64_t flags = (s.waiting_for_batch ? kWaitingForBatch : 0) | (s.unflushed_ends ? kUnflushedEnds : 0) |
                              (s.capacity_bound ? kCapacityBound : 0);
  record_.clear();
  record_.insert(record_.end(),
                 {bits(now_ns), bits(clock.at(s.boundary)), flags, bits(s.num_executed), bits(s.last_prefill),
                  bits(s.num_free_blocks), pair(kept.num_running, kept.num_running + kept.num_waiting),
                  pair(left_out.num_running, left_out.num_waiting), bits(left_out.prefill_tokens),
                  s.in_flight.size()});
  for (std::size_t i = 0; i < s.in_flight.size(); ++i) put_batch(record_, s, i, kept, clock);
  for (std::size_t i = 0; i < s.requests.size(); ++i) {
    if (kept.place(static_cast<std::int64_t>(i)) >= 0) put_request(record_, s.requests[i], s.details[i], clock);
  }
  channel_.write(record_);
}

void SnapshotWriter::publish(const Engine& engine, const InstanceClock& clock, std::int64_t now_ns) {
  Snapshot::capture(engine, shot_);
  publish(shot_, clock, now_ns);
}

SnapshotReader::SnapshotReader(const std::string& name, std::int64_t epoch_ns)
    : channel_(name, kFormat), epoch_ns_(epoch_ns) {}

bool SnapshotReader::poll(std::int64_t now_ns) {
  const bool changed = channel_.poll(now_ns);
  polled_ns_ = now_ns;
  if (!changed) return false;
  decoded_ = false;
  published_ns_ = channel_.record().empty() ? now_ns : static_cast<std::int64_t>(channel_.record().front());
  ++num_changes_;
  return true;
}

Picoseconds SnapshotReader::since_epoch(std::int64_t ns) const {
  return std::clamp<std::int64_t>(ns - epoch_ns_, 0, kMostNs) * 1000;
}

const std::shared_ptr<const Snapshot>& SnapshotReader::snapshot() {
  const Picoseconds now = state() == SourceState::live ? since_epoch(polled_ns_) : since_epoch(published_ns_);
  const bool runs_on = decoded_ && snapshot_ && !snapshot_->in_flight.empty() && snapshot_->taken_at < now;
  if (decoded_ && !runs_on) return snapshot_;
  std::shared_ptr<Snapshot> shot = spare_ && spare_.use_count() == 1 ? spare_ : std::make_shared<Snapshot>();
  spare_ = std::const_pointer_cast<Snapshot>(std::exchange(snapshot_, nullptr));
  decoded_ = true;
  if (!channel_.record().empty() && decode(*shot)) {
    shot->taken_at = std::max(now, shot->boundary);
    snapshot_ = std::move(shot);
  }
  return snapshot_;
}

SchedulerConfig SnapshotReader::config() const {
  if (channel_.generation() == 0) throw std::runtime_error("no writer was met yet, so its options are not known");
  return config_of(channel_.attributes());
}

// False if the words contradict each other, which those of a SnapshotWriter never do.
bool SnapshotReader::decode(Snapshot& s) const {
  const std::vector<std::uint64_t>& words = channel_.record();
  const auto number = [&](std::size_t at) { return static_cast<std::int64_t>(words[at]); };
  if (words.size() < kHeadWords) return false;
  s.version = Snapshot::kVersion;
  s.boundary = since_epoch(number(1));
  s.intake = -1;
  s.waiting_for_batch = (words[2] & kWaitingForBatch) != 0;
  s.unflushed_ends = (words[2] & kUnflushedEnds) != 0;
  s.capacity_bound = (words[2] & kCapacityBound) != 0;
  s.num_executed = number(3);
  s.last_prefill = number(4);
  s.num_free_blocks = number(5);
  s.num_running = high(words[6]);
  const std::int64_t count = low(words[6]);
  s.in_step = {};  // nobody added them up
  s.left_out = {high(words[7]), low(words[7]), number(8)};
  if (words[9] > kMostBatches || s.num_running < 0 || count < s.num_running) return false;
  s.in_flight.resize(words[9]);
  std::size_t at = kHeadWords;
  for (Snapshot::BatchInFlight& batch : s.in_flight) {
    if (words.size() - at < kBatchWords) return false;
    batch.start = since_epoch(number(at));
    batch.features = {number(at + 1), number(at + 2), number(at + 3), number(at + 4), number(at + 5)};
    batch.num_lockstep = number(at + 6);
    const std::uint64_t entries = words[at + 7];
    at += kBatchWords;
    if ((words.size() - at) / kEntryWords < entries) return false;
    batch.entries.clear();
    for (std::uint64_t i = 0; i < entries; ++i, at += kEntryWords) {
      batch.entries.push_back({high(words[at]), low(words[at]), low(words[at + 1])});
      if (batch.entries.back().request < 0 || batch.entries.back().request >= count) return false;
    }
  }
  if (words.size() - at != static_cast<std::size_t>(count) * kRequestWords) return false;
  s.requests.resize(static_cast<std::size_t>(count));
  s.details.resize(static_cast<std::size_t>(count));
  for (std::size_t i = 0; i < s.requests.size(); ++i, at += kRequestWords) {
    take_request(&words[at], s.requests[i], s.details[i]);
    s.details[i].arrival_time = std::clamp(number(at + 7) - epoch_ns_, -kMostNs, kMostNs) * 1000;  // only a key
    s.details[i].sequence = static_cast<std::uint32_t>(i);
  }
  return true;
}

}  // namespace simcluster
