#include "snapshot_channel.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <stdexcept>
#include <utility>

#include "prefetch.hpp"

namespace simcluster {
namespace {

std::uint64_t bits(std::int64_t value) { return static_cast<std::uint64_t>(value); }

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

}  // namespace

SnapshotWriter::SnapshotWriter(const std::string& name, std::size_t capacity, const SchedulerConfig& config,
                               std::size_t num_slots)
    : capacity_(capacity),
      num_phases_(static_cast<std::size_t>(config.block_size)),
      channel_(name, {kSnapshotFormat, num_slots, most_words(capacity, config.block_size), words_of(config)}) {}

void SnapshotWriter::publish(const Snapshot& s, const InstanceClock& clock, std::int64_t now_ns) {
  if (channel_.is_closed()) throw std::runtime_error("this writer of snapshots was closed");
  static thread_local std::vector<std::uint64_t> scratch;  // of all writers
  std::vector<std::uint64_t>& record = *in_register(&scratch);
  record.clear();
  put_snapshot(record, s, {capacity_, num_phases_, clock, now_ns, false});
  channel_.write(record);
}

void SnapshotWriter::publish(const Engine& engine, const InstanceClock& clock, std::int64_t now_ns) {
  static thread_local Snapshot scratch;  // likewise
  Snapshot& shot = *in_register(&scratch);
  Snapshot::capture(engine, shot);
  publish(shot, clock, now_ns);
}

SnapshotReader::SnapshotReader(const std::string& name, std::int64_t epoch_ns, double speed)
    : channel_(name, kSnapshotFormat), clock_{epoch_ns, speed} {
  if (!(speed > 0) || !std::isfinite(speed)) throw std::invalid_argument("a clock's speed must be above 0 and finite");
}

bool SnapshotReader::poll(std::int64_t now_ns, bool asks) {
  const bool changed = channel_.poll(now_ns, asks);
  polled_ns_ = now_ns;
  if (!changed) return false;
  decoded_ = false;
  published_ns_ = channel_.record().empty() ? now_ns : static_cast<std::int64_t>(channel_.record().front());
  ++num_changes_;
  return true;
}

// Nothing has happened after the newest record while its writer lives.
Picoseconds SnapshotReader::known_until() const {
  return clock_.at(state() == SourceState::live ? polled_ns_ : published_ns_);
}

void SnapshotReader::refresh(InstanceView& view, std::int64_t now_ns, bool asks) {
  poll(now_ns, asks);
  if (channel_.record().empty() || view.shows(num_changes_, now())) return;
  view.refresh_later({channel_.kept_record(), clock_, known_until()}, num_changes_);
}

const std::shared_ptr<const Snapshot>& SnapshotReader::snapshot() {
  const Picoseconds now = known_until();
  const bool runs_on = decoded_ && snapshot_ && !snapshot_->in_flight.empty() && snapshot_->taken_at < now;
  if (decoded_ && !runs_on) return snapshot_;
  std::shared_ptr<Snapshot> shot = spare_ && spare_.use_count() == 1 ? spare_ : std::make_shared<Snapshot>();
  spare_ = std::const_pointer_cast<Snapshot>(std::exchange(snapshot_, nullptr));
  decoded_ = true;
  const PublishedSnapshot published{channel_.kept_record(), clock_, now};
  if (!published.words->empty() && published.take(*shot)) snapshot_ = std::move(shot);
  return snapshot_;
}

SchedulerConfig SnapshotReader::config() const {
  if (channel_.generation() == 0) throw std::runtime_error("no writer was met yet, so its options are not known");
  return config_of(channel_.attributes());
}

}  // namespace simcluster
